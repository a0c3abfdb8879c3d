"""The scheduler: which ready run starts next, and how handlers share the workers."""

from __future__ import annotations

import asyncio

import pytest

from outboxio.dispatch import scheduler as module
from outboxio.dispatch.scheduler import Scheduler, Turns
from outboxio.dispatch.state import DispatchState
from outboxio.handlers.options import DeadHook
from outboxio.model.notification import DYING
from outboxio.model.outcome import Lease
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import HookRun, Run
from outboxio.settings import Settings
from tests.kit.dispatching import Parts, queue_of, row_of

pytestmark = pytest.mark.virtual_time


def ready(state: DispatchState, queue: HandlerQueue, number: int) -> None:
    for sequence in range(number):
        queue.ready.append(Run(row_of(sequence + 1, queue.handler.name), queue, Lease("lease", queue.handler.name, 1)))
    state.ready += number


def scheduled(*queues: HandlerQueue, concurrency: int = 8, transactions: int = 4) -> tuple[Scheduler, DispatchState]:
    parts = Parts(*queues, settings=Settings(concurrency=concurrency), transactions=transactions)
    return parts.scheduler, parts.state


def started(scheduler: Scheduler) -> list[str]:
    """The handlers of all runs that may start now."""
    names = list[str]()
    while (run := scheduler.next_run()) is not None:
        names.append(run.queue.handler.name)
    return names


EIGHT = Settings(concurrency=8)


async def test_a_single_handler_has_all_workers_up_to_its_limit() -> None:
    for limit, expected in ((None, 8), (3, 3)):
        queue = queue_of(settings=EIGHT, **({} if limit is None else {"concurrency": limit}))
        scheduler, state = scheduled(queue)
        ready(state, queue, 20)
        scheduler.enlist(queue)
        assert len(started(scheduler)) == state.running == expected
        assert state.ready == 20 - expected


async def test_handlers_take_turns() -> None:
    queues = [queue_of(name, settings=EIGHT, handlers=2) for name in "ab"]
    scheduler, state = scheduled(*queues)
    for queue in queues:
        ready(state, queue, 2)
        scheduler.enlist(queue)
    assert started(scheduler) == ["a", "b", "a", "b"]


async def test_many_runs_of_a_slow_handler_do_not_delay_another() -> None:
    slow, quick = [queue_of(name, settings=EIGHT, handlers=2) for name in ("slow", "quick")]
    scheduler, state = scheduled(slow, quick)
    ready(state, slow, 100)
    scheduler.enlist(slow)
    assert started(scheduler) == ["slow"] * 6  # two workers are the share of the quick handler

    ready(state, quick, 1)
    scheduler.enlist(quick)
    assert started(scheduler) == ["quick"]


async def test_a_finished_run_lets_a_delayed_handler_continue() -> None:
    slow, quick = [queue_of(name, settings=EIGHT, handlers=2) for name in ("slow", "quick")]
    scheduler, state = scheduled(slow, quick)
    ready(state, slow, 100)
    scheduler.enlist(slow)
    started(scheduler)
    scheduler.leave(next(iter(slow.running)))
    assert started(scheduler) == ["slow"]


async def test_a_transactional_handler_waits_for_a_transaction_without_a_worker() -> None:
    first, second = [
        queue_of(name, settings=EIGHT, handlers=2, delivery="transactional", concurrency=8) for name in "ab"
    ]
    scheduler, state = scheduled(first, second, transactions=2)
    for queue in (first, second):
        ready(state, queue, 3)
        scheduler.enlist(queue)
    assert started(scheduler) == ["a", "b"]

    scheduler.leave(next(iter(first.running)))
    assert started(scheduler) == ["a"], "the share of the second handler is taken, that of the first is free"


async def test_a_stuck_run_keeps_its_transaction_until_its_handler_ends() -> None:
    queue = queue_of(delivery="transactional", concurrency=2)
    scheduler, state = scheduled(queue, transactions=1)
    ready(state, queue, 2)
    scheduler.enlist(queue)
    assert started(scheduler) == ["h"]
    (run,) = queue.running
    run.abandon()
    scheduler.leave(run)
    assert started(scheduler) == []
    scheduler.release(run)
    assert started(scheduler) == ["h"]


async def test_without_ready_or_running_rows_the_scheduler_is_idle() -> None:
    queue = queue_of()
    scheduler, state = scheduled(queue)
    ready(state, queue, 1)
    state.quiet.clear()
    scheduler.enlist(queue)
    started(scheduler)
    assert not state.quiet.is_set()
    scheduler.leave(next(iter(queue.running)))
    assert state.quiet.is_set()


async def test_a_half_empty_queue_is_refilled() -> None:
    queue = queue_of()
    scheduler, state = scheduled(queue, concurrency=1000)
    ready(state, queue, queue.ahead.window // 2 + 1)
    scheduler.enlist(queue)
    scheduler.next_run()
    assert state.signals.find.is_set


# --- priorities ------------------------------------------------------------------------------------


async def test_a_lower_priority_number_comes_first() -> None:
    turns, queues = Turns(), {number: queue_of(f"p{number}", priority=number) for number in (5, 0, 9)}
    for queue in queues.values():
        turns.append(queue)
    assert [turns.popleft().spec.priority for _ in range(3)] == [0, 5, 9]
    assert not turns


async def test_a_queue_that_waited_long_enough_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_TURN", 0.02)
    turns, late, urgent = Turns(), queue_of("late", priority=9), queue_of("urgent", priority=0)
    turns.append(late)
    await asyncio.sleep(0.03)
    turns.append(urgent)
    assert [turns.popleft(), turns.popleft()] == [late, urgent]


# --- hooks -----------------------------------------------------------------------------------------


async def hook(envelope: object, error: object) -> None: ...


def owed(scheduler: Scheduler, queue: HandlerQueue, number: int) -> None:
    name = queue.handler.name
    for sequence in range(number):
        scheduler.add_hook(HookRun(row_of(sequence + 1, name, state=DYING), queue, Lease("lease", name, 1)))


async def test_hooks_take_turns_within_the_transaction_limit() -> None:
    on_dead: DeadHook = hook
    queues = [queue_of(name, on_dead=on_dead) for name in "ab"]
    scheduler, state = scheduled(*queues, transactions=3)
    for queue in queues:
        owed(scheduler, queue, 3)
    runs = list[HookRun]()
    while (run := scheduler.next_hook()) is not None:
        runs.append(run)
    assert [run.queue.handler.name for run in runs] == ["a", "b", "a"]
    assert (state.hooks, state.ready, state.quiet.is_set()) == (3, 3, False)

    scheduler.leave_hook(runs[0])
    following = scheduler.next_hook()
    assert following is not None
    assert following.queue.handler.name == "b"
