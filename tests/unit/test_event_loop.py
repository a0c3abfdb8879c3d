"""An outbox belongs to one event loop at a time: which loop may use it, and which are refused."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest

from outboxio import WrongEventLoop
from outboxio.loops.owner import EventLoopGuard


class Member:
    """Holds a resource of an event loop, and counts its resets."""

    def __init__(self, guard: EventLoopGuard) -> None:
        self.beginnings = 0
        guard.when_taken_over(self.reset)

    def reset(self) -> object:
        self.beginnings += 1
        return None


@pytest.fixture
def guard() -> EventLoopGuard:
    return EventLoopGuard("the outbox of namespace 'app'")


async def enter(guard: EventLoopGuard) -> None:
    assert guard.enter() is asyncio.get_running_loop()


def in_a_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a second thread, and raise its exception."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="the other")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


async def test_another_loop_is_refused_while_the_first_one_is_open(
    guard: EventLoopGuard,
) -> None:
    guard.enter()
    with pytest.raises(WrongEventLoop) as caught:
        in_a_thread(lambda: asyncio.run(enter(guard)))

    said = str(caught.value)
    assert "the outbox of namespace 'app' belongs to the event loop of thread 'MainThread', which runs" in said
    assert "used in that of thread 'the other'" in said
    assert "one Outbox per event loop, or `await outbox.close()`" in said
    guard.enter()  # the first one still works


def test_an_open_loop_may_return_and_keeps_its_state(guard: EventLoopGuard) -> None:
    first = asyncio.new_event_loop()
    first.run_until_complete(enter(guard))
    with pytest.raises(WrongEventLoop, match="is not running, but was not closed"):
        asyncio.run(enter(guard))
    first.run_until_complete(enter(guard))
    first.close()

    asyncio.run(enter(guard))


def test_after_a_closed_loop_the_next_one_starts_fresh(guard: EventLoopGuard) -> None:
    member = Member(guard)
    for number in (1, 2, 3):
        asyncio.run(enter(guard))
        assert member.beginnings == number


def test_after_a_garbage_collected_loop_the_next_one_starts_fresh(guard: EventLoopGuard) -> None:
    member, loops = Member(guard), [asyncio.new_event_loop()]
    loops[0].run_until_complete(enter(guard))

    def collect() -> None:
        loops.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed event loop"):
        collect()

    asyncio.run(enter(guard))
    assert member.beginnings == 2


async def test_after_closing_any_loop_is_accepted(guard: EventLoopGuard) -> None:
    member = Member(guard)
    guard.enter()
    guard.leave()
    guard.enter()
    assert member.beginnings == 1

    guard.leave()
    in_a_thread(lambda: asyncio.run(enter(guard)))
    assert member.beginnings == 2
    guard.enter()  # the loop of the thread is closed
    assert member.beginnings == 3


def test_use_without_a_running_event_loop_is_refused(guard: EventLoopGuard) -> None:
    with pytest.raises(WrongEventLoop, match=r"belongs to no event loop yet, but was used where no event loop runs"):
        guard.enter()


def test_of_two_threads_binding_at_the_same_time_one_wins(guard: EventLoopGuard) -> None:
    member, refused = Member(guard), list[WrongEventLoop]()
    together, done = threading.Barrier(8), threading.Barrier(8)

    async def use() -> None:
        together.wait()
        try:
            guard.enter()
        except WrongEventLoop as error:
            refused.append(error)
        done.wait()  # no loop is closed before all have tried

    threads = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(refused) == 7
    assert member.beginnings == 1


def test_garbage_collected_members_are_dropped(guard: EventLoopGuard) -> None:
    for _ in range(100):
        Member(guard)
    kept = Member(guard)

    asyncio.run(enter(guard))
    assert kept.beginnings == 1
    assert len(guard._members) <= 2


def test_a_member_that_refuses_the_loop_leaves_the_outbox_unbound(guard: EventLoopGuard) -> None:
    class Refusing:
        def reset(self) -> object:
            raise WrongEventLoop("the pool", "another event loop", "here")

    refusing = Refusing()
    guard.when_taken_over(refusing.reset)
    for _ in range(2):
        with pytest.raises(WrongEventLoop, match="the pool belongs to another event loop"):
            asyncio.run(enter(guard))
    del refusing
    gc.collect()
    asyncio.run(enter(guard))
