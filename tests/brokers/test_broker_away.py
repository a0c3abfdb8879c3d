"""An unavailable broker costs no attempt and no UPDATE, and the relay resumes soon after its return.

``OUTBOXIO_TEST_BROKER_AWAY=60 OUTBOXIO_TEST_FULL_SIZE=1 pytest tests/brokers/test_broker_away.py -s`` runs the full
size, and prints the rate before and after.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from outboxio import Outbox
from tests.kit.app import Look, eventually
from tests.kit.broker_course import Counted
from tests.kit.broker_kinds import KINDS

AWAY = float(os.environ.get("OUTBOXIO_TEST_BROKER_AWAY", "3"))  # seconds
WAITING = 2000  # events that are due while the broker is away
LARGEST_GROWTH = 40_000  # KiB of memory; the waiting rows of the queue take a few thousand


async def count(outbox: Outbox, number: int) -> None:
    async with outbox.transaction("count") as tx:
        for at in range(number):
            tx.emit(Counted(f"k{at % 50}", at), ordering_key=f"k{at % 50}")


@pytest.mark.real_time("shows that nothing changes while a broker is away for seconds")
@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_an_unavailable_broker_costs_no_attempt_and_no_update(
    kind: str, postgres_url: str, tmp_path: Path
) -> None:
    look = Look(postgres_url)
    broker = KINDS[kind](tmp_path / "broker")
    broker.start()
    try:
        await broker.prepare()
        outbox = Outbox(postgres_url, namespace="away")
        outbox.add_handler(KINDS[kind].relay(broker.url))
        await outbox.migrate()
        async with outbox, outbox.running():
            await count(outbox, WAITING)
            before = await drained(look, WAITING)
            await asyncio.to_thread(broker.stop)
            await count(outbox, WAITING)
            await eventually(lambda: waits(look, WAITING))
            rows, memory = await places(look), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            end = time.monotonic() + AWAY
            while time.monotonic() < end:
                await count(outbox, 10)
                await asyncio.sleep(0.5)
            assert (await places(look)).items() >= rows.items()
            assert await look.value("SELECT max(attempts) FROM {event_notifications} WHERE state = 'PENDING'") == 0
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < LARGEST_GROWTH
            total = int(await look.value("SELECT count(*) FROM {events} WHERE event_type = 'Counted'"))
            await asyncio.to_thread(broker.start)
            after = await drained(look, total)
        print(f"\n{kind}: {WAITING} events took {before:.2f} s before, and {after:.2f} s after {AWAY:g} s away")
        assert await look.value("SELECT max(attempts) FROM {event_notifications}") == 1  # the successful run
    finally:
        broker.stop()


async def places(look: Look) -> dict[Any, Any]:
    """The physical location of each waiting row, which an UPDATE changes."""
    rows = await look.fetch("SELECT id, ctid::text AS place FROM {event_notifications} WHERE state = 'PENDING'")
    return {row["id"]: row["place"] for row in rows}


async def waits(look: Look, number: int) -> bool:
    return (await look.states()).get("PENDING", 0) >= number


async def drained(look: Look, number: int) -> float:
    """The seconds until this many events are sent."""
    begun = time.monotonic()

    async def sent() -> bool:
        return (await look.states()).get("SUCCEEDED", 0) >= number

    await eventually(sent)
    return time.monotonic() - begun
