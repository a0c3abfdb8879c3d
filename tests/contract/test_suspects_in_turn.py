"""After two crashes all suspects run, even while other rows are always due."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from outboxio import EventEnvelope, RetryPolicy, Settings
from tests.contract.test_poison import die, insert_notifications, suspect
from tests.kit.app import Look, MoneyDeposited, eventually
from tests.kit.probes import MakeOutbox

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

Envelope = EventEnvelope[MoneyDeposited]
NAMES = ("books", "ledger", "mail")
EVENTS, SUSPECTS = 150, 6  # of each


@pytest.mark.real_time("runs last long enough for others to start beside them")
@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
async def test_suspects_of_several_handlers_run_in_turn_under_load(
    make_outbox: MakeOutbox, look: Look, delivery: str
) -> None:
    settings = Settings(handling_poll_delay="20ms", fanout_poll_delay="20ms", purge_enabled=False)
    outbox = await make_outbox(settings=settings)
    inside, ran = Counter[str](), set[tuple[str, int]]()
    runs: dict[str, list[bool]] = {name: [] for name in NAMES}
    """For each handler, whether each run was of a suspect, in order of their starts."""
    beside: list[tuple[str, int]] = []

    def handler(name: str) -> Any:
        async def handle(envelope: Envelope) -> None:
            amount = int(envelope.event.amount)
            inside[name] += 1
            try:
                is_suspect = amount < SUSPECTS and (name, amount) not in ran
                runs[name].append(is_suspect)
                if is_suspect:
                    ran.add((name, amount))
                    beside.extend([(name, amount)] * (inside[name] - 1))
                await asyncio.sleep(0.001)
                raise ValueError("its service is down")
            finally:
                inside[name] -= 1

        return handle

    for name in NAMES:
        policy = RetryPolicy(base="10ms", factor=1, jitter=0)
        outbox.handler(MoneyDeposited, name=name, delivery=delivery, retry=policy)(handler(name))
    await insert_notifications(outbox, EVENTS)
    for name in NAMES:
        await suspect(outbox, name, *range(SUSPECTS))
    await die(look, *NAMES)

    async with outbox.running():
        await eventually(lambda: len(ran) == SUSPECTS * len(NAMES), timeout=60)
        await eventually(lambda: not any(runs[name][-1] for name in NAMES))

    assert beside == [], "each ran without another run of its handler"
    for started in runs.values():
        first = started.index(True)
        assert started[first : first + SUSPECTS] == [True] * SUSPECTS, "the other rows of the handler follow"
