"""A thread with an event loop, for work that goes on while the application's event loop stands still.

A process has at most a single such thread, from the first ``enlist`` to the last ``leave``. The thread is a daemon, and
a forked child has no thread, so the thread never keeps an interpreter from exiting.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from outboxio.support.machine import in_forked_children

T = TypeVar("T")

LOOK_DELAY = 5.0  # seconds between two checks that the thread is alive
LONGEST_END = 1.0  # seconds that the thread has to end its tasks, and that ``stop`` waits for the thread

_turn = threading.Lock()
_current: Background | None = None
_inherited: list[Background] = []


class Background:
    """The thread and its event loop."""

    def __init__(self) -> None:
        # Not the loop of the application's policy, which may have a clock of its own.
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._users = 0
        self._thread = threading.Thread(target=self._run, name="outboxio", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    @classmethod
    def enlist(cls) -> Background:
        """The thread of this process, kept until :meth:`leave`."""
        global _current
        with _turn:
            if _current is None or not _current.is_alive:
                _current = cls()
            _current._users += 1
            return _current

    def leave(self) -> None:
        """The caller does not need the thread any longer. After the last caller the thread ends."""
        global _current
        with _turn:
            self._users -= 1
            if self._users > 0:
                return
            if _current is self:
                _current = None
        self.stop()

    @property
    def is_alive(self) -> bool:
        """True if the thread runs. In a forked child the parent's thread does not run."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def soon(self, callback: Callable[..., object], *args: Any) -> bool:
        """Let the thread call ``callback``. False if the thread has ended."""
        return self.is_alive and call_soon(self.loop, callback, *args)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do ``work`` in the thread, and wait for the result. A cancellation cancels the work, and waits for its end.

        Raises the error of the work, and :class:`ConnectionResetError` if the thread has ended.
        """
        home = asyncio.get_running_loop()
        ended: asyncio.Future[asyncio.Task[T]] = home.create_future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self.loop.create_task(work()))
            tasks[0].add_done_callback(tell)

        def tell(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # marks the exception as retrieved: the waiting task may be gone
            call_soon(home, _settle, ended, task)

        if not self.soon(begin):
            raise ConnectionResetError("the thread of the cluster locks has ended")
        cancelled: asyncio.CancelledError | None = None
        while not ended.done():
            try:
                await asyncio.wait((ended,), timeout=LOOK_DELAY)
                if not (ended.done() or self.is_alive):
                    raise ConnectionResetError("the thread of the cluster locks has ended")
            except asyncio.CancelledError as error:
                cancelled = error
                self.soon(lambda: tasks[0].cancel())
        if cancelled is not None:
            raise cancelled
        if ended.result().cancelled():
            raise ConnectionResetError("the thread of the cluster locks has ended")
        return ended.result().result()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            try:
                self.loop.run_until_complete(_end_tasks())
            finally:
                self.loop.close()

    def stop(self) -> None:
        """End the thread at once, with or without callers that need it, and wait for its end."""
        if self.soon(self.loop.stop) and threading.current_thread() is not self._thread:
            self._thread.join(LONGEST_END)


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> bool:
    """Let the event loop of a different thread call ``callback``. False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return False
    return True


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=LONGEST_END)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _forget_in_child() -> None:
    """Keep the parent's thread, loop and sockets unchanged: closing the sockets here would disturb the parent."""
    global _current, _turn
    _turn = threading.Lock()
    if _current is not None:
        _inherited.append(_current)
        _current = None


def _stop_at_exit() -> None:
    """Close the sessions in good order, and let the daemon thread finish a line of the log."""
    if (thread := _current) is not None:
        thread.stop()


in_forked_children(_forget_in_child)
atexit.register(_stop_at_exit)
