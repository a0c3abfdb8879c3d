"""One shard of three goes silent: the others do not notice, and it is back soon after its network is."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest

from outboxio import EventEnvelope, Outbox, Settings
from tests.app import Look, MoneyDeposited, eventually
from tests.flow.proxy import Proxy, proxy_to
from tests.servers import DIALECTS, Server

SHARDS = ("first", "second", "third")
SILENCE = 4.0  # seconds, several times as long as the locks are proven
PAUSE = 0.02  # seconds between two actions on a shard


class Handled:
    """How many events of each shard were handled, and how late the latest was."""

    def __init__(self, outbox: Outbox) -> None:
        self.numbers = Counter[str]()
        self.latest = 0.0
        outbox.handler(MoneyDeposited, name="receipt")(self._handle)

    async def _handle(self, envelope: EventEnvelope[MoneyDeposited]) -> None:
        self.numbers[envelope.shard] += 1
        self.latest = max(self.latest, time.monotonic() - float(envelope.event.amount))


@pytest.fixture
async def third(postgres_url: str, tmp_path: Path) -> AsyncIterator[tuple[dict[str, str], Proxy]]:
    """The URLs of three databases on one server, and the proxy before the third."""
    server = Server("postgres", 0, postgres_url, "the same")
    async with AsyncExitStack() as stack:
        urls = [postgres_url]
        urls += [stack.enter_context(DIALECTS["postgres"].fresh_database(server, tmp_path)) for _ in range(2)]
        proxy = await stack.enter_async_context(proxy_to(urls[-1]))
        yield dict(zip(SHARDS, [*urls[:-1], proxy.url], strict=True)), proxy


async def deposit(outbox: Outbox, shard: str, until: float) -> int:
    """Execute actions on a shard until then; how many."""
    number = 0
    while time.monotonic() < until:
        async with outbox.transaction("Deposit", shard=shard) as tx:
            tx.emit(MoneyDeposited(uuid4(), Decimal(time.monotonic())))
        number += 1
        await asyncio.sleep(PAUSE)
    return number


async def test_a_silent_shard_disturbs_no_other_and_recovers(third: tuple[dict[str, str], Proxy]) -> None:
    urls, proxy = third
    async with Outbox(urls, namespace="app", settings=Settings(lock_heartbeat="500ms")) as outbox:
        handled = Handled(outbox)
        await outbox.migrate()
        async with outbox.running():
            before = await asyncio.gather(*(deposit(outbox, shard, time.monotonic() + 1) for shard in SHARDS))
            await eventually(lambda: handled.numbers.total() == sum(before))
            handled.latest = 0.0

            proxy.fall_silent()
            until = time.monotonic() + SILENCE
            meanwhile = await asyncio.gather(*(deposit(outbox, shard, until) for shard in SHARDS[:2]))
            expected = dict(zip(SHARDS, map(sum, zip(before, meanwhile, strict=False)), strict=False))
            await eventually(lambda: all(handled.numbers[shard] == number for shard, number in expected.items()))
            assert handled.latest < SILENCE / 2, "an event waited for a shard that is not its own"
            assert all(m > b * SILENCE / 4 for b, m in zip(before, meanwhile, strict=False)), "a shard was slowed down"

            proxy.speak_again()
            after = await deposit(outbox, "third", time.monotonic() + 0.5)
            await eventually(lambda: handled.numbers["third"] == before[2] + after, timeout=10)
    rows = await asyncio.gather(*(Look(url).states() for url in urls.values()))
    assert [set(states) for states in rows] == [{"SUCCEEDED"}] * 3
