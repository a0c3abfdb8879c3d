from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

import outboxio
from outboxio.support.aio import Signal, TimeLimit, propagate_cancellation, run_to_completion, wait_done
from tests.kit.app import eventually

pytestmark = pytest.mark.virtual_time

LONG = 3600.0


# --- a signal ------------------------------------------------------------------------------------


async def test_wait_returns_at_once_if_the_signal_is_set() -> None:
    signal = Signal()
    signal.set()

    assert await signal.wait(LONG)
    assert not signal.is_set


async def test_setting_the_signal_ends_the_current_wait() -> None:
    signal = Signal()
    waiting = asyncio.create_task(signal.wait(LONG))
    await asyncio.sleep(0)
    signal.set()
    signal.set()

    assert await asyncio.wait_for(waiting, 5)
    assert not signal.is_set


async def test_the_wait_ends_after_the_timeout() -> None:
    assert not await Signal().wait(0)


async def test_a_signal_set_at_the_timeout_counts() -> None:
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


async def test_only_waits_beyond_the_time_limit_expire() -> None:
    limit, expired = TimeLimit(0.05), list[str]()
    for name in ("quick", "slow", "slower"):
        limit.begin(name, expired.append)
    limit.end("quick")
    await eventually(lambda: len(expired) == 2)
    limit.begin("later", expired.append)
    assert expired == ["slow", "slower"]
    await eventually(lambda: len(expired) == 3)
    assert expired == ["slow", "slower", "later"]


async def test_a_late_or_repeated_completion_is_ignored() -> None:
    limit, expired = TimeLimit(0.01), list[str]()
    limit.begin("slow", expired.append)
    await eventually(lambda: expired)
    limit.end("slow")
    limit.end("slow")
    limit.begin("slow", expired.append)
    await eventually(lambda: len(expired) == 2)


# --- with a time limit ---------------------------------------------------------------------------


def test_wait_for_is_not_used() -> None:
    """In Python 3.11 ``wait_for`` loses a cancellation that comes together with the result; ``asyncio.timeout`` does
    not.
    """
    package = Path(outboxio.__file__).parent

    assert [path.name for path in package.rglob("*.py") if "wait_for(" in path.read_text()] == []


class Forgetful:
    """Returns a value, and swallows a cancellation in the meantime."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started = asyncio.Event()
        self.given_back: list[str] = []
        self._error = error

    async def get(self) -> str:
        self.started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG)
        if self._error is not None:
            raise self._error
        return "a connection"

    async def give_back(self, what: str) -> None:
        await asyncio.sleep(0)
        self.given_back.append(what)


async def test_a_swallowed_cancellation_is_raised_and_the_result_is_undone() -> None:
    driver = Forgetful()
    getting = asyncio.create_task(propagate_cancellation(driver.get(), driver.give_back))
    await driver.started.wait()
    getting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await getting
    assert driver.given_back == ["a connection"]


async def test_an_error_does_not_hide_a_swallowed_cancellation() -> None:
    driver = Forgetful(ConnectionResetError("lost"))
    getting = asyncio.create_task(propagate_cancellation(driver.get(), driver.give_back))
    await driver.started.wait()
    getting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await getting
    assert driver.given_back == []


async def test_without_a_cancellation_results_and_errors_pass_through() -> None:
    async def get(error: Exception | None) -> str:
        if error is not None:
            raise error
        return "a connection"

    driver = Forgetful()
    assert await propagate_cancellation(get(None), driver.give_back) == "a connection"
    with pytest.raises(ConnectionResetError, match="lost"):
        await propagate_cancellation(get(ConnectionResetError("lost")), driver.give_back)
    assert driver.given_back == []


# --- to the end ----------------------------------------------------------------------------------


async def test_run_to_completion_returns_the_result() -> None:
    async def work() -> int:
        return 7

    assert await run_to_completion(work()) == 7


async def test_run_to_completion_raises_the_error() -> None:
    async def work() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await run_to_completion(work())


class Slow:
    """Work that continues until the test releases it, and then returns or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started = asyncio.Event()
        self.resumed = asyncio.Event()
        self.has_ended = False
        self._error = error

    async def work(self) -> None:
        self.started.set()
        await self.resumed.wait()
        self.has_ended = True
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_cancellation_is_raised_after_completion(cancellations: int) -> None:
    slow = Slow()
    waiting = asyncio.create_task(run_to_completion(slow.work()))
    await slow.started.wait()
    for _ in range(cancellations):
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done()
    slow.resumed.set()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert slow.has_ended


async def test_an_error_after_a_cancellation_is_its_cause() -> None:
    slow = Slow(ValueError("at the end"))

    async def cause_of_cancellation() -> BaseException | None:
        try:
            await run_to_completion(slow.work())
        except asyncio.CancelledError as error:
            return error.__cause__
        return None

    waiting = asyncio.create_task(cause_of_cancellation())
    await slow.started.wait()
    waiting.cancel()
    await asyncio.sleep(0)
    slow.resumed.set()

    assert repr(await waiting) == "ValueError('at the end')"


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_work_that_hangs_after_a_cancellation_is_stopped(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr("outboxio.support.aio.PATIENCE", 0.01)
    slow = Slow()
    given_up: list[bool] = []

    def give_up() -> None:
        given_up.append(True)
        slow.resumed.set()

    working = asyncio.create_task(slow.work())
    waiting = asyncio.create_task(wait_done(working, give_up))
    await slow.started.wait()
    if is_cancelled:
        waiting.cancel()
        assert isinstance(await waiting, asyncio.CancelledError)
    else:
        await asyncio.sleep(0.05)
        assert not waiting.done()
        slow.resumed.set()
        assert await waiting is None

    assert given_up == [True] * is_cancelled
    assert slow.has_ended


async def test_asyncio_cancellation_interrupts_an_anyio_shield_but_not_run_to_completion() -> None:
    """Decision 25: the reason for ``run_to_completion``."""
    finished: list[str] = []

    async def clean_up(name: str) -> None:
        await asyncio.sleep(0.02)
        finished.append(name)

    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            await clean_up("shielded")

    tasks = [asyncio.create_task(shielded()), asyncio.create_task(run_to_completion(clean_up("to the end")))]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    assert finished == ["to the end"]
    assert all(task.cancelled() for task in tasks)
