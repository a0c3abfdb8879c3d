from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from outboxio.loops import loop as loop_module
from outboxio.loops.loop import IDLE_FRACTION, NEVER, NOTHING, Loop, PollSchedule, RoundResult
from tests.kit.virtual_time import timers

pytestmark = pytest.mark.virtual_time


class Service:
    """Runs the given rounds one after another, then idle rounds; a test can wait for every round."""

    def __init__(self, *rounds: RoundResult | BaseException) -> None:
        self._rounds = list(rounds)
        self.done = 0
        self._counted = asyncio.Condition()

    async def run_once(self) -> RoundResult:
        self.done += 1
        async with self._counted:
            self._counted.notify_all()
        result = self._rounds.pop(0) if self._rounds else NOTHING
        if isinstance(result, BaseException):
            raise result
        return result

    def plan(self, *rounds: RoundResult | BaseException) -> None:
        self._rounds += rounds

    async def rounds(self, number: int) -> None:
        async with asyncio.timeout(5), self._counted:
            await self._counted.wait_for(lambda: self.done >= number)


FULL = RoundResult(1000, more=True)
LONG = 3600.0


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "pause_after", lambda failures: 0.001)


async def driving(loop: Loop, until: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        await until()
        loop.stop()


def idle_loop(service: Service, delay: float = LONG) -> Loop:
    return Loop("work", service.run_once, PollSchedule(lambda: delay))


async def test_a_full_round_is_followed_by_the_next_at_once() -> None:
    service = Service(FULL, FULL, FULL)

    await driving(idle_loop(service), lambda: service.rounds(4))

    assert service.done == 4


async def test_an_idle_loop_polls() -> None:
    service = Service()

    await driving(idle_loop(service, delay=0.001), lambda: service.rounds(3))


async def test_a_wake_up_ends_the_wait() -> None:
    service = Service()
    loop = idle_loop(service)

    async def until() -> None:
        for number in (1, 2, 3):
            await service.rounds(number)
            loop.wake()
        await service.rounds(4)

    await driving(loop, until)


async def test_an_eager_loop_polls_again_soon_after_finding_something() -> None:
    service = Service(RoundResult(1))
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, eager_for=lambda: NEVER, quickest=0.001))

    await driving(loop, lambda: service.rounds(10))


async def test_a_loop_starts_eager() -> None:
    """Other processes may have been committing for long."""
    service = Service()
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, eager_for=lambda: NEVER, quickest=0.001))

    await driving(loop, lambda: service.rounds(5))


async def test_a_loop_stays_eager_for_a_while() -> None:
    service = Service(RoundResult(1))
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, eager_for=lambda: 0.01, quickest=0.001))
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        await service.rounds(2)
        await asyncio.sleep(0.1)
        before = service.done
        await asyncio.sleep(0.1)
        assert service.done == before
        loop.stop()


async def test_a_full_round_counts_as_finding_something() -> None:
    """Otherwise a loop would wait behind a full round for a share of the silence before it: commits of a hundred events
    waited 0.3 s.
    """
    service = Service()
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, eager_for=lambda: 0.1, quickest=0.001))
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        await asyncio.sleep(0.3)  # it is no longer eager
        service.plan(FULL)
        done = service.done
        loop.wake()
        await service.rounds(done + 5)
        loop.stop()


async def test_unannounced_rows_make_the_loop_poll_quickly() -> None:
    """A producer with plain SQL on PostgreSQL sends no wake-up: after a short break its events would wait for a
    whole poll.
    """
    service = Service(RoundResult(1))
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, quickest=0.001, woken_within=60.0))

    await driving(loop, lambda: service.rounds(10))


async def test_announced_rows_do_not_make_the_loop_poll_quickly() -> None:
    service = Service()
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, quickest=0.001, woken_within=60.0))
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        await service.rounds(1)
        service.plan(RoundResult(1))
        loop.wake()
        await service.rounds(2)
        await asyncio.sleep(0.01)
        done = service.done
        await asyncio.sleep(0.1)
        assert service.done == done
        loop.stop()


async def test_a_loop_without_wake_ups_starts_polling_quickly() -> None:
    service = Service()
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, quickest=0.001, woken_within=60.0))

    await driving(loop, lambda: service.rounds(5))


async def test_a_loop_that_is_not_eager_waits_after_finding_something() -> None:
    service = Service(RoundResult(1))
    loop = idle_loop(service)
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        await service.rounds(1)
        await asyncio.sleep(0.1)
        assert service.done == 1
        loop.stop()


async def test_a_wake_up_during_a_round_is_not_lost() -> None:
    rounds = 0
    second = asyncio.Event()

    async def run_once() -> RoundResult:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            loop.wake()
        else:
            second.set()
        return NOTHING

    async def until() -> None:
        await asyncio.wait_for(second.wait(), 5)

    loop = Loop("work", run_once, PollSchedule(lambda: LONG))
    await driving(loop, until)


async def test_wake_ups_before_the_first_round_are_merged() -> None:
    service = Service()
    loop = idle_loop(service)
    for _ in range(3):
        loop.wake()

    await driving(loop, lambda: service.rounds(2))

    assert service.done == 2


async def test_stop_waits_for_the_current_round() -> None:
    started, resumed = asyncio.Event(), asyncio.Event()
    ended = []

    async def run_once() -> RoundResult:
        started.set()
        await resumed.wait()
        ended.append(True)
        return FULL

    loop = Loop("work", run_once, PollSchedule(lambda: LONG))
    running = asyncio.create_task(loop.run())
    await started.wait()
    loop.stop()
    resumed.set()
    await asyncio.wait_for(running, 5)

    assert ended == [True]


async def test_a_stopped_loop_runs_no_round() -> None:
    service = Service()
    loop = idle_loop(service)
    loop.stop()

    await asyncio.wait_for(loop.run(), 5)

    assert service.done == 0


async def test_errors_are_counted_and_logged_with_one_stack(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    broken = [RuntimeError("first"), ExceptionGroup("second", [ValueError()]), RuntimeError("third")]
    service = Service(*broken, RoundResult(1), *broken[:1])
    loop = idle_loop(service, delay=0.001)

    await driving(loop, lambda: service.rounds(4))
    assert (loop.errors, loop.failures, loop.last_error) == (3, 0, broken[2])

    records = [record for record in caplog.records if record.name == "outboxio.loops.loop"]
    assert [record.levelname for record in records] == ["ERROR", "WARNING", "INFO"]
    assert [record.exc_info is not None for record in records] == [True, False, False]
    assert "recovered after 3 failed rounds" in records[-1].getMessage()
    assert vars(records[-1])["outboxio_suppressed"] == 1, "the third failure is of the same kind as the first"


async def test_an_outage_logs_one_line_a_minute_with_the_failure_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "pause_after", lambda failures: 4.8)
    caplog.set_level(logging.INFO)
    service = Service(*[OSError("no route")] * 30, NOTHING)

    async def until() -> None:
        for number in range(1, 32):
            await service.rounds(number)

    await driving(idle_loop(service), until)

    records = [vars(record) for record in caplog.records if record.name == "outboxio.loops.loop"]
    logged = [(record["levelname"], record["outboxio_failures"]) for record in records]
    assert logged == [("ERROR", 1), ("WARNING", 14), ("WARNING", 27), ("INFO", 30)]
    assert sum(record.get("outboxio_suppressed", 0) for record in records) == 30 - 3


async def test_a_loop_stopped_in_an_outage_logs_the_unreported_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service(*[OSError("no route")] * 3)
    loop = idle_loop(service)

    async def until() -> None:
        await service.rounds(3)
        loop.stop()

    await driving(loop, until)

    assert caplog.records[-1].getMessage() == "work stopped after 3 consecutive failed rounds"
    assert vars(caplog.records[-1])["outboxio_suppressed"] == 2


async def test_consecutive_failures_lengthen_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def pause_after(failures: int) -> float:
        calls.append(failures)
        return 0.001

    monkeypatch.setattr(loop_module, "pause_after", pause_after)
    service = Service(*[ValueError()] * 3, NOTHING, ValueError())

    await driving(idle_loop(service, delay=0.001), lambda: service.rounds(6))

    assert calls == [1, 2, 3, 1]


async def test_a_wake_up_ends_the_pause_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "pause_after", lambda failures: LONG)
    service = Service(ValueError())
    loop = idle_loop(service)

    async def until() -> None:
        await service.rounds(1)
        loop.wake()
        await service.rounds(2)

    await driving(loop, until)


async def test_cancellation_stops_a_loop() -> None:
    service = Service()
    running = asyncio.create_task(idle_loop(service).run())
    await service.rounds(1)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_first_failure_after_a_blocked_event_loop_hides_driver_details(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked_for = [12.0]
    monkeypatch.setattr(loop_module, "blocked_since", lambda since: blocked_for.pop() if blocked_for else 0.0)
    service = Service(OSError("state 12"), OSError("no route"), NOTHING)
    caplog.set_level(logging.INFO)

    await driving(idle_loop(service), lambda: service.rounds(3))

    logged = [(record.levelname, record.getMessage(), bool(record.exc_info)) for record in caplog.records[:2]]
    assert [(level, has_stack) for level, _, has_stack in logged] == [("INFO", False), ("ERROR", True)]
    assert logged[0][1].startswith("work failed after the event loop was blocked for 12.0 s; retrying in")


async def test_a_round_may_schedule_the_next_one() -> None:
    service = Service(RoundResult(1, again_in=0.02))
    await driving(idle_loop(service), lambda: service.rounds(2))
    assert service.done == 2


async def test_a_poll_is_not_delayed_by_a_scheduled_round() -> None:
    service = Service(*[RoundResult(0, again_in=LONG)] * 3)
    await driving(idle_loop(service, delay=0.01), lambda: service.rounds(3))


async def test_a_delayed_wake_up_is_repeated_once_after_the_last() -> None:
    service = Service()
    loop = idle_loop(service)
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        await service.rounds(1)
        for _ in range(3):
            loop.wake(again_after=0.2)
            await asyncio.sleep(0.02)
        before = service.done
        await service.rounds(before + 2)  # 0.2 s after the first call, and 0.2 s after the last call
        await asyncio.sleep(0.1)
        assert service.done == before + 2
        loop.stop()


async def test_a_finished_loop_leaves_no_timer() -> None:
    service = Service()
    loop = idle_loop(service)
    await driving(loop, lambda: service.rounds(1))
    before = timers()
    loop = idle_loop(service)
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        await asyncio.sleep(0)
        loop.wake(again_after=LONG)
        loop.stop()
        loop.wake(again_after=LONG)
    assert timers() == before


async def test_a_loop_stopped_before_its_start_leaves_no_timer() -> None:
    before, loop = timers(), idle_loop(Service())
    loop.wake(again_after=LONG)
    loop.stop()
    assert timers() == before


# --- the schedule, without time --------------------------------------------------------------------


def test_an_idle_schedule_has_one_pause() -> None:
    schedule = PollSchedule(lambda: 5.0)
    schedule.begin(0.0)
    assert [schedule.pause(now) for now in (0.0, 1.0, 100.0)] == [5.0, 5.0, 5.0]


def test_an_eager_schedule_waits_a_bounded_share_of_the_idle_time() -> None:
    schedule = PollSchedule(lambda: 5.0, eager_for=lambda: NEVER, quickest=0.01)
    schedule.begin(0.0)
    assert schedule.pause(0.0) == 0.01
    assert schedule.pause(4.0) == 4.0 / IDLE_FRACTION
    assert schedule.pause(100.0) == 5.0
    schedule.found(100.0)
    assert schedule.pause(100.0) == 0.01


def test_a_schedule_is_eager_for_the_configured_time() -> None:
    schedule = PollSchedule(lambda: 5.0, eager_for=lambda: 0.1, quickest=0.01)
    schedule.begin(0.0)
    assert schedule.pause(0.09) < 5.0
    assert schedule.pause(0.11) == 5.0


def test_a_schedule_stays_eager_after_unannounced_rows_until_a_wake_up() -> None:
    schedule = PollSchedule(lambda: 5.0, quickest=0.01, woken_within=0.07)
    schedule.begin(0.0)
    assert schedule.pause(1.0) < 5.0, "a producer may have been writing before"
    schedule.woken(1.0)
    schedule.found(1.05)
    assert schedule.pause(1.05) == 5.0
    schedule.found(2.0)
    assert schedule.pause(2.0) == 0.01
    assert schedule.pause(10.0) == 8.0 / IDLE_FRACTION
