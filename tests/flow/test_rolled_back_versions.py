"""A deployment is rolled back: events that only the newer code can decode wait for it, and nothing is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from outboxio import Outbox
from tests.flow.versions_worker import EVENTS
from tests.kit.app import Look, eventually
from tests.kit.processes import Worker

pytestmark = pytest.mark.above_statements

StartProgram = Callable[..., Awaitable[Worker]]
PROGRAM = "tests.flow.versions_worker"


async def test_a_rolled_back_deployment_loses_no_event_of_the_newer_version(
    database_url: str, start_program: StartProgram, look: Look
) -> None:
    async def deploy(version: int, first: int, *, handles: bool = True) -> Worker:
        worker = await start_program(PROGRAM, database=database_url, version=version, first=first, handles=handles)
        await worker.until("running")
        return worker

    newer = await deploy(2, 0)
    await newer.until("ordered", EVENTS)
    await newer.until("plain", EVENTS)
    await newer.leave()

    crashed = await deploy(2, 4, handles=False)
    await crashed.until("written")
    crashed.kill()

    older = await deploy(1, 8)
    await older.until("plain", EVENTS)
    outbox = Outbox(database_url, namespace="app")
    done = len(older.of("plain"))
    waiting = {row.payload["number"] for row in await outbox.admin.list("PENDING") if row.payload}
    assert {row.attempts for row in await outbox.admin.list("PENDING")} <= {0}
    assert waiting, "the events of the newer version wait"
    assert done >= EVENTS
    await older.leave()

    back = await deploy(2, 12)
    await eventually(lambda: is_settled(look, 4 * EVENTS))
    await back.leave()

    workers = (newer, crashed, older, back)
    for name in ("plain", "ordered"):
        numbers = sorted({report["number"] for worker in workers for report in worker.of(name)})
        assert numbers == list(range(4 * EVENTS))
    order = [report["number"] for report in back.of("ordered")]
    assert order == sorted(order)
    assert {report["attempt"] for report in back.of("ordered")} == {1}
    assert (await outbox.admin.counts())["unroutable"] == 0
    await outbox.close()


async def is_settled(look: Look, events: int) -> bool:
    return await look.states() == {"SUCCEEDED": 2 * events}
