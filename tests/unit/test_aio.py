from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

import outboxio
from outboxio.support.aio import Signal, TimeLimit, heeding_cancellation, over, to_the_end
from tests.kit.app import eventually

pytestmark = pytest.mark.virtual_time

LONG = 3600.0


# --- a signal ------------------------------------------------------------------------------------


async def test_a_signal_that_is_up_is_not_waited_for() -> None:
    signal = Signal()
    signal.set()

    assert await signal.wait(LONG)
    assert not signal.is_set


async def test_a_signal_ends_the_wait_that_is_under_way() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait(LONG))
    await asyncio.sleep(0)
    signal.set()
    signal.set()

    assert await asyncio.wait_for(waiting, 5)
    assert not signal.is_set


async def test_without_a_signal_the_time_ends_the_wait() -> None:
    assert not await Signal().wait(0)


async def test_a_signal_that_comes_with_the_end_of_the_time_counts() -> None:
    signal = Signal()
    asyncio.get_running_loop().call_soon(signal.set)

    assert await signal.wait(0)


async def test_a_cancelled_wait_leaves_the_signal_usable() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait(LONG))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    signal.set()
    assert await signal.wait(LONG)


# --- one time limit for many waits ---------------------------------------------------------------


async def test_what_ends_in_time_is_left_alone_and_what_does_not_is_ended() -> None:
    limit, expired = TimeLimit(0.05), list[str]()
    for name in ("quick", "slow", "slower"):
        limit.begin(name, expired.append)
    limit.end("quick")
    await eventually(lambda: len(expired) == 2)
    limit.begin("later", expired.append)
    assert expired == ["slow", "slower"]
    await eventually(lambda: len(expired) == 3)
    assert expired == ["slow", "slower", "later"]


async def test_an_end_that_comes_late_or_twice_changes_nothing() -> None:
    limit, expired = TimeLimit(0.01), list[str]()
    limit.begin("slow", expired.append)
    await eventually(lambda: expired)
    limit.end("slow")
    limit.end("slow")
    limit.begin("slow", expired.append)
    await eventually(lambda: len(expired) == 2)


# --- with a time limit ---------------------------------------------------------------------------


def test_nothing_is_awaited_with_wait_for() -> None:
    """In Python 3.11 ``wait_for`` loses a cancellation that comes together with the result; ``asyncio.timeout`` does
    not.
    """
    package = Path(outboxio.__file__).parent

    assert [path.name for path in package.rglob("*.py") if "wait_for(" in path.read_text()] == []


class Forgetful:
    """Gives out a value, and forgets a cancellation that comes meanwhile."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = asyncio.Event()
        self.given_back: list[str] = []
        self._error = error

    async def get(self) -> str:
        self.begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG)
        if self._error is not None:
            raise self._error
        return "a connection"

    async def give_back(self, what: str) -> None:
        await asyncio.sleep(0)
        self.given_back.append(what)


async def test_a_cancellation_that_was_forgotten_is_raised_and_what_came_of_it_is_given_back() -> None:
    driver = Forgetful()
    getting = asyncio.create_task(heeding_cancellation(driver.get(), driver.give_back))
    await driver.begun.wait()
    getting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await getting
    assert driver.given_back == ["a connection"]


async def test_an_error_does_not_take_the_place_of_a_forgotten_cancellation() -> None:
    driver = Forgetful(ConnectionResetError("lost"))
    getting = asyncio.create_task(heeding_cancellation(driver.get(), driver.give_back))
    await driver.begun.wait()
    getting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await getting
    assert driver.given_back == []


async def test_without_a_cancellation_what_came_of_it_is_kept_and_errors_are_raised() -> None:
    async def get(error: Exception | None) -> str:
        if error is not None:
            raise error
        return "a connection"

    driver = Forgetful()
    assert await heeding_cancellation(get(None), driver.give_back) == "a connection"
    with pytest.raises(ConnectionResetError, match="lost"):
        await heeding_cancellation(get(ConnectionResetError("lost")), driver.give_back)
    assert driver.given_back == []


# --- to the end ----------------------------------------------------------------------------------


async def test_to_the_end_returns_what_the_coroutine_returns() -> None:
    async def work() -> int:
        return 7

    assert await to_the_end(work()) == 7


async def test_to_the_end_raises_what_the_coroutine_raises() -> None:
    async def work() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await to_the_end(work())


class Slow:
    """Work that goes on until the test lets it go, and then ends or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.has_ended = False
        self._error = error

    async def work(self) -> None:
        self.begun.set()
        await self.goes_on.wait()
        self.has_ended = True
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_cancellation_goes_on_only_after_the_end(cancellations: int) -> None:
    slow = Slow()
    waiting = asyncio.create_task(to_the_end(slow.work()))
    await slow.begun.wait()
    for _ in range(cancellations):
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    slow.goes_on.set()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert slow.has_ended


async def test_an_error_after_a_cancellation_is_its_cause() -> None:
    slow = Slow(ValueError("at the end"))

    async def cause_of_cancellation() -> BaseException | None:
        try:
            await to_the_end(slow.work())
        except asyncio.CancelledError as error:
            return error.__cause__
        return None

    waiting = asyncio.create_task(cause_of_cancellation())
    await slow.begun.wait()
    waiting.cancel()
    await asyncio.sleep(0)
    slow.goes_on.set()

    assert repr(await waiting) == "ValueError('at the end')"


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_what_does_not_end_after_a_cancellation_is_given_up(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr("outboxio.support.aio.PATIENCE", 0.01)
    slow = Slow()
    given_up: list[bool] = []

    def give_up() -> None:
        given_up.append(True)
        slow.goes_on.set()

    working = asyncio.create_task(slow.work())
    waiting = asyncio.create_task(over(working, give_up))
    await slow.begun.wait()
    if is_cancelled:
        waiting.cancel()
        assert isinstance(await waiting, asyncio.CancelledError)
    else:
        await asyncio.sleep(0.05)
        assert not waiting.done()
        slow.goes_on.set()
        assert await waiting is None

    assert given_up == [True] * is_cancelled
    assert slow.has_ended


async def test_a_cancellation_of_asyncio_cuts_a_shield_of_anyio_short_and_not_to_the_end() -> None:
    """Decision 25: the reason for ``to_the_end``."""
    finished: list[str] = []

    async def clean_up(name: str) -> None:
        await asyncio.sleep(0.02)
        finished.append(name)

    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            await clean_up("shielded")

    tasks = [asyncio.create_task(shielded()), asyncio.create_task(to_the_end(clean_up("to the end")))]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    assert finished == ["to the end"]
    assert all(task.cancelled() for task in tasks)
