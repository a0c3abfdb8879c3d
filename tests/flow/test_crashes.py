"""Runs that are repeated after a kill: the rows of the tables in docs/explanation/what-a-crash-repeats.md.

For transactional and ordered handlers see ``test_at_scale.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from outboxio import Outbox
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, opened
from tests.kit.processes import Worker

pytestmark = pytest.mark.one_of_family

StartWorker = Callable[..., Awaitable[Worker]]

PAYLOAD = {"wallet_id": "00000000-0000-0000-0000-000000000007", "amount": "12"}


@pytest.fixture
async def successor(database_url: str) -> AsyncIterator[Outbox]:
    """An outbox of this process, which runs no handlers until the test starts it."""
    async with opened(Outbox(database_url, namespace="app")) as outbox:
        yield outbox


async def states(look: Look) -> dict[str, str]:
    return {row["handler_name"]: row["state"] for row in await look.notifications()}


def journal_for(outbox: Outbox, name: str, **options: Any) -> Journal:
    journal = Journal()
    outbox.handler(MoneyDeposited, name=name, **options)(journal)
    return journal


@pytest.mark.parametrize("phase", ["inside the handlers", "after them, before their outcomes are written"])
async def test_an_interrupted_run_is_repeated_unless_it_is_at_most_once(
    successor: Outbox, look: Look, start_worker: StartWorker, phase: str
) -> None:
    ends = phase.startswith("after")
    worker = await start_worker(
        look.url,
        {"name": "least", "gated": True},
        {"name": "most", "gated": True, "delivery": "at_most_once"},
        dies_with_outcome=2 if ends else 0,
        outcome_delay="1m",
    )
    await worker.until("running")
    await successor.executor.execute(Emit((1,)))
    await worker.until("call", 2)
    if ends:
        worker.open_gate()
    else:
        worker.kill()
    await eventually(lambda: worker.is_gone)
    assert len(worker.of("done")) == (2 if ends else 0)
    assert await states(look) == {"least": "PENDING", "most": "PENDING"}

    least, most = journal_for(successor, "least"), journal_for(successor, "most", delivery="at_most_once")
    drained = await successor.drain(timeout="30s")

    assert (drained.succeeded, drained.dead) == (1, 1)
    assert ([envelope.attempt for envelope in least.envelopes], len(most)) == ([1], 0)
    assert await states(look) == {"least": "SUCCEEDED", "most": "DEAD"}
    (dead,) = await successor.admin.list(state="DEAD")
    assert (dead.errors[-1]["type"], dead.attempts) == ("InterruptedRun", 1)


async def test_a_crash_beside_a_slow_handler_repeats_no_other_run(
    successor: Outbox, look: Look, start_worker: StartWorker
) -> None:
    """An event with four handlers: three have finished in different ways while the slow handler still runs."""
    worker = await start_worker(
        look.url,
        {"name": "fast"},
        {"name": "slow", "gated": True},
        {"name": "flaky", "fails_on": [1]},
        {"name": "refuses", "refuses": [1]},
    )
    await worker.until("running")
    await successor.executor.execute(Emit((1,)))
    ended = {"fast": "SUCCEEDED", "flaky": "FAILED", "refuses": "DEAD"}
    await eventually(lambda: _are(look, {**ended, "slow": "PENDING"}))
    assert len(worker.of("call", handler="slow")) == 1

    worker.kill()
    await eventually(lambda: worker.is_gone)
    journals = {name: journal_for(successor, name) for name in ("fast", "slow", "flaky", "refuses")}
    await successor.drain(timeout="30s")

    assert {name: len(journal) for name, journal in journals.items()} == {
        "fast": 0,
        "slow": 1,
        "flaky": 0,
        "refuses": 0,
    }
    assert await states(look) == {**ended, "slow": "SUCCEEDED"}
    # The flaky handler's row becomes due at its retry time, not at the end of the process.
    (flaky,) = await successor.admin.list(state="FAILED")
    assert (flaky.attempts, (flaky.next_retry_at - flaky.updated_date).total_seconds() > 20) == (1, True)


async def _are(look: Look, expected: dict[str, str]) -> bool:
    return await states(look) == expected


async def test_an_inline_message_is_completed_by_its_redelivery(successor: Outbox, look: Look) -> None:
    """The process dies between the end of a handler and its mark, as if the mark had not been written."""
    first, second = Journal(), Journal()
    successor.handler(MoneyDeposited, name="first")(first)
    successor.handler(MoneyDeposited, name="second", priority=1)(second)
    message = {"source": "bank", "external_id": "m-1", "type": "MoneyDeposited", "payload": PAYLOAD}
    await successor.inbox.consume(message)
    await look.fetch("DELETE FROM {consumed_events} WHERE handler_name LIKE '%second'")

    done = await successor.inbox.consume(message)

    assert (done.seen, done.succeeded, len(first), len(second)) == (("first",), ("second",), 1, 2)
