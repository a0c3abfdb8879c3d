from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from outboxio.loops import loop as loop_module
from outboxio.loops.loop import FOR_EVER, NOTHING, SHARE_OF_SILENCE, Loop, PollSchedule, RoundResult
from tests.kit.virtual_time import timers

pytestmark = pytest.mark.virtual_time


class Service:
    """Does the given rounds in turn, then idle rounds; a test can wait for every round."""

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


async def test_an_eager_loop_looks_again_soon_after_something_was_found() -> None:
    service = Service(RoundResult(1))
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, eager_for=lambda: FOR_EVER, quickest=0.001))

    await driving(loop, lambda: service.rounds(10))


async def test_an_eager_loop_is_eager_when_it_begins() -> None:
    """Other processes may have been committing for long."""
    service = Service()
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, eager_for=lambda: FOR_EVER, quickest=0.001))

    await driving(loop, lambda: service.rounds(5))


async def test_it_is_eager_for_a_while() -> None:
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


async def test_a_full_round_is_one_that_has_found_something() -> None:
    """Otherwise a loop would wait behind a full round for a share of the silence before it: commits of a hundred events
    waited 0.3 s.
    """
    service = Service()
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, eager_for=lambda: 0.1, quickest=0.001))
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        await asyncio.sleep(0.3)  # it has given up
        service.plan(FULL)
        done = service.done
        loop.wake()
        await service.rounds(done + 5)
        loop.stop()


async def test_what_nobody_woke_it_for_is_looked_for_quickly_from_then_on() -> None:
    """A producer with plain SQL on PostgreSQL sends no wake-up: after a moment's break its events would wait for a
    whole poll.
    """
    service = Service(RoundResult(1))
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, quickest=0.001, heard_within=60.0))

    await driving(loop, lambda: service.rounds(10))


async def test_what_it_was_woken_for_is_not_followed_by_quick_looks() -> None:
    service = Service()
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, quickest=0.001, heard_within=60.0))
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


async def test_whoever_may_not_be_woken_looks_quickly_when_it_begins() -> None:
    service = Service()
    loop = Loop("work", service.run_once, PollSchedule(lambda: LONG, quickest=0.001, heard_within=60.0))

    await driving(loop, lambda: service.rounds(5))


async def test_a_loop_that_is_not_eager_waits_also_after_something_was_found() -> None:
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


async def test_wake_ups_before_the_first_round_are_one() -> None:
    service = Service()
    loop = idle_loop(service)
    for _ in range(3):
        loop.wake()

    await driving(loop, lambda: service.rounds(2))

    assert service.done == 2


async def test_stop_lets_the_round_under_way_end() -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()
    ended = []

    async def run_once() -> RoundResult:
        begun.set()
        await goes_on.wait()
        ended.append(True)
        return FULL

    loop = Loop("work", run_once, PollSchedule(lambda: LONG))
    running = asyncio.create_task(loop.run())
    await begun.wait()
    loop.stop()
    goes_on.set()
    await asyncio.wait_for(running, 5)

    assert ended == [True]


async def test_a_stopped_loop_does_no_round() -> None:
    service = Service()
    loop = idle_loop(service)
    loop.stop()

    await asyncio.wait_for(loop.run(), 5)

    assert service.done == 0


async def test_errors_are_survived_counted_and_logged_with_one_stack(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    broken = [RuntimeError("first"), ExceptionGroup("second", [ValueError()]), RuntimeError("third")]
    service = Service(*broken, RoundResult(1), *broken[:1])
    loop = idle_loop(service, delay=0.001)

    await driving(loop, lambda: service.rounds(4))
    assert (loop.errors, loop.failures, loop.last_error) == (3, 0, broken[2])

    records = [record for record in caplog.records if record.name == "outboxio.loops.loop"]
    assert [record.levelname for record in records] == ["ERROR", "WARNING", "INFO"]
    assert [record.exc_info is not None for record in records] == [True, False, False]
    assert "works again after 3 failed rounds" in records[-1].getMessage()
    assert vars(records[-1])["outboxio_suppressed"] == 1, "the third failure is of the same kind as the first"


async def test_an_outage_writes_a_line_a_minute_with_the_number_of_failures(
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
    told = [(record["levelname"], record["outboxio_failures"]) for record in records]
    assert told == [("ERROR", 1), ("WARNING", 14), ("WARNING", 27), ("INFO", 30)]
    assert sum(record.get("outboxio_suppressed", 0) for record in records) == 30 - 3


async def test_a_loop_that_ends_in_an_outage_says_how_many_failures_the_log_does_not_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Service(*[OSError("no route")] * 3)
    loop = idle_loop(service)

    async def until() -> None:
        await service.rounds(3)
        loop.stop()

    await driving(loop, until)

    assert caplog.records[-1].getMessage() == "work ends after 3 failed rounds in a row"
    assert vars(caplog.records[-1])["outboxio_suppressed"] == 2


async def test_failures_in_a_row_lengthen_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pause_after(failures: int) -> float:
        asked.append(failures)
        return 0.001

    monkeypatch.setattr(loop_module, "pause_after", pause_after)
    service = Service(*[ValueError()] * 3, NOTHING, ValueError())

    await driving(idle_loop(service, delay=0.001), lambda: service.rounds(6))

    assert asked == [1, 2, 3, 1]


async def test_a_wake_up_ends_the_pause_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "pause_after", lambda failures: LONG)
    service = Service(ValueError())
    loop = idle_loop(service)

    async def until() -> None:
        await service.rounds(1)
        loop.wake()
        await service.rounds(2)

    await driving(loop, until)


async def test_cancellation_ends_a_loop() -> None:
    service = Service()
    running = asyncio.create_task(idle_loop(service).run())
    await service.rounds(1)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_failure_after_a_standstill_shows_nothing_of_the_driver_and_the_next_one_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stood_still = [12.0]
    monkeypatch.setattr(loop_module, "stood_still_since", lambda moment: stood_still.pop() if stood_still else 0.0)
    service = Service(OSError("state 12"), OSError("no route"), NOTHING)
    caplog.set_level(logging.INFO)

    await driving(idle_loop(service), lambda: service.rounds(3))

    told = [(record.levelname, record.getMessage(), bool(record.exc_info)) for record in caplog.records[:2]]
    assert [(level, has_stack) for level, _, has_stack in told] == [("INFO", False), ("ERROR", True)]
    assert told[0][1].startswith("work failed, for the event loop stood still for 12.0 s, and is tried again in")


async def test_a_round_may_say_when_the_next_one_is_to_be_though_nobody_wakes_it() -> None:
    service = Service(RoundResult(1, again_in=0.02))
    await driving(idle_loop(service), lambda: service.rounds(2))
    assert service.done == 2


async def test_a_poll_is_not_put_off_by_a_round_that_says_when_the_next_one_is_to_be() -> None:
    service = Service(*[RoundResult(0, again_in=LONG)] * 3)
    await driving(idle_loop(service, delay=0.01), lambda: service.rounds(3))


async def test_a_wake_up_for_another_clock_is_repeated_once_after_the_last_of_several() -> None:
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


async def test_a_loop_that_has_ended_leaves_no_timer() -> None:
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


async def test_a_loop_that_was_never_begun_leaves_no_timer_when_stopped() -> None:
    before, loop = timers(), idle_loop(Service())
    loop.wake(again_after=LONG)
    loop.stop()
    assert timers() == before


# --- the schedule, without time --------------------------------------------------------------------


def test_an_idle_schedule_has_one_pause() -> None:
    schedule = PollSchedule(lambda: 5.0)
    schedule.begin(0.0)
    assert [schedule.pause(now) for now in (0.0, 1.0, 100.0)] == [5.0, 5.0, 5.0]


def test_an_eager_schedule_waits_for_a_share_of_the_silence_and_never_longer_than_its_delay() -> None:
    schedule = PollSchedule(lambda: 5.0, eager_for=lambda: FOR_EVER, quickest=0.01)
    schedule.begin(0.0)
    assert schedule.pause(0.0) == 0.01
    assert schedule.pause(4.0) == 4.0 / SHARE_OF_SILENCE
    assert schedule.pause(100.0) == 5.0
    schedule.found(100.0)
    assert schedule.pause(100.0) == 0.01


def test_a_schedule_is_eager_for_as_long_as_it_is_told() -> None:
    schedule = PollSchedule(lambda: 5.0, eager_for=lambda: 0.1, quickest=0.01)
    schedule.begin(0.0)
    assert schedule.pause(0.09) < 5.0
    assert schedule.pause(0.11) == 5.0


def test_a_schedule_stays_eager_after_rows_that_no_wake_up_announced_until_a_wake_up_announces_some() -> None:
    schedule = PollSchedule(lambda: 5.0, quickest=0.01, heard_within=0.07)
    schedule.begin(0.0)
    assert schedule.pause(1.0) < 5.0, "a producer may have been writing before"
    schedule.woken(1.0)
    schedule.found(1.05)
    assert schedule.pause(1.05) == 5.0
    schedule.found(2.0)
    assert schedule.pause(2.0) == 0.01
    assert schedule.pause(10.0) == 8.0 / SHARE_OF_SILENCE
