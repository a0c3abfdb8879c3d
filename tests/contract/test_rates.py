"""``rate=``: the starts of a handler are reserved in a row of the database, and no start is reserved twice."""

from __future__ import annotations

import asyncio

import pytest

from outboxio import Outbox
from outboxio.storage.tables.rates import Rates
from tests.kit.inside import database_of

pytestmark = pytest.mark.with_tables


@pytest.fixture
def rates(outbox: Outbox) -> Rates:
    return database_of(outbox).rates


async def test_reserved_spans_follow_each_other(rates: Rates) -> None:
    firsts = await asyncio.gather(*(rates.reserve("app", "mail", earliest=1_000, span=10) for _ in range(20)))
    assert sorted(firsts) == list(range(1_000, 1_200, 10))


async def test_an_unused_span_expires(rates: Rates) -> None:
    now = 1_900_000_000_000_000
    assert await rates.reserve("app", "mail", earliest=now, span=10) == now
    assert await rates.reserve("app", "mail", earliest=now + 500, span=10) == now + 500
    assert await rates.reserve("app", "mail", earliest=now, span=10) == now + 510


async def test_each_handler_of_a_namespace_has_its_own_rate(rates: Rates) -> None:
    for namespace, name in (("app", "mail"), ("app", "sms"), ("other", "mail")):
        assert await rates.reserve(namespace, name, earliest=7, span=1) == 7
