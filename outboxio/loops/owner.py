"""The event loop guard, which restricts an outbox to one event loop at a time.

Connections, futures and locks belong to the event loop that created them. If two event loops used an outbox at the same
time, connections of one loop would be used in the other, or be lost. On SQLite both loops would write in the same
transaction; on a server a task could wait indefinitely.

So the first use binds the outbox to the running loop, and a second loop is rejected as long as the first one may still
run. Only this module enforces the rule. Objects that hold connections, futures or locks call the guard on each use, and
are reset when another loop takes over.

The same applies to a forked child process, which has copies of all connections: if the parent had opened the outbox,
the guard rejects every use in the child (decision 57).

The module also provides a background thread with an event loop, for work that continues while your application's event
loop is blocked. A process has at most one such thread, from the first ``enlist`` to the last ``leave``. It never keeps
the interpreter from exiting, because it is a daemon thread and does not exist in a forked child.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from outboxio.errors import WrongEventLoop, WrongProcess
from outboxio.support import machine
from outboxio.support.machine import in_forked_children

_Loop = asyncio.AbstractEventLoop
_Reset = Callable[[], object]

_of_parents: list[object] = []
"""Objects with connections of a parent process. They are kept until the process ends, because closing a copy of a
connection in a forked child may end the connection of the parent."""


class EventLoopGuard:
    """Binds an outbox to the event loop that uses it, and rejects any other loop.

    Another loop takes over if the previous one was closed (a second ``asyncio.run``, a loop for each test) or was
    garbage-collected, or if the outbox was closed. A forked child may use an outbox that its parent had not opened, or
    had closed.

    Example::

        guard = EventLoopGuard("the outbox of namespace 'app'")
        loop = guard.enter()      # in a coroutine; raises WrongEventLoop in a second loop
    """

    def __init__(self, subject: str) -> None:
        """``subject``: the name of the guarded object in errors."""
        self._subject = subject
        self._owner: Callable[[], _Loop | None] = _nobody
        self._former: Callable[[], _Loop | None] = _nobody
        self._thread = ""
        self._process = 0
        self._opened_in: int | None = None
        self._taking = threading.Lock()
        self._members: list[weakref.WeakMethod[_Reset]] = []
        _guards.add(self)

    @classmethod
    def of_shard(cls, name: str) -> EventLoopGuard:
        """Create the guard of a database that is used without an outbox."""
        return cls(f"shard {name!r}")

    def when_taken_over(self, reset: _Reset) -> None:
        """Register a method to call whenever an event loop takes over, including the first one.

        It must drop the objects that belong to an event loop. Only a weak reference to it is kept.
        """
        self._members = [member for member in self._members if member() is not None]
        self._members.append(weakref.WeakMethod(reset))

    def enter(self) -> _Loop:
        """Bind the outbox to the running event loop, and return the loop.

        Raises :class:`WrongEventLoop` if the outbox is bound to a different loop, or if no event loop runs, and
        :class:`WrongProcess` in a forked child whose parent had opened the outbox.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            self.refuse_in_child()
            raise WrongEventLoop(self._subject, self._describe_owner(), "where no event loop runs") from error
        if self._owner() is not loop:
            self._take(loop)
        return loop

    @property
    def loop(self) -> _Loop | None:
        """The event loop that the outbox is bound to, if any. It may be closed."""
        return self._owner()

    @property
    def is_bound(self) -> bool:
        """True if the outbox has been used, and neither it nor its event loop is closed."""
        owner = self._owner()
        return owner is not None and not owner.is_closed()

    def refuse_in_child(self) -> None:
        """Raise :class:`WrongProcess` in a forked child whose parent had opened the outbox."""
        if self._opened_in is not None:
            raise WrongProcess(self._subject, self._opened_in, machine.pid())

    def leave(self) -> None:
        """Unbind the outbox when it is closed, so that another event loop may use it."""
        with self._taking:
            self._owner = _nobody

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` in the event loop that the outbox is bound to, from any thread."""
        if (owner := self._owner()) is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                owner.call_soon_threadsafe(callback)

    def _take(self, loop: _Loop) -> None:
        with self._taking:
            self.refuse_in_child()
            owner = self._owner()
            if owner is not None and owner is not loop and not owner.is_closed():
                raise WrongEventLoop(self._subject, self._describe_owner(), f"in that of {_this_thread()}")
            if self._former() is not loop:
                for member in self._members:
                    if (reset := member()) is not None:
                        reset()
            self._owner = self._former = weakref.ref(loop)
            self._thread, self._process = _this_thread(), machine.pid()

    def begin_child(self) -> None:
        """Reset the guard in a forked child, without closing the parent's objects or calling its event loop."""
        self._taking = threading.Lock()  # a thread of the parent may have held the lock
        if self._owner is not _nobody:
            self._opened_in = self._process
            _of_parents.append([member() for member in self._members])
        self._owner = self._former = _nobody

    def _describe_owner(self) -> str:
        owner = self._owner()
        if owner is None:
            return "no event loop yet"
        state = "runs" if owner.is_running() else "is not running, but was not closed"
        return f"the event loop of {self._thread}, which {state}"


_guards: weakref.WeakSet[EventLoopGuard] = weakref.WeakSet()


def _begin_child() -> None:
    for guard in list(_guards):
        guard.begin_child()


in_forked_children(_begin_child)


def _nobody() -> None:
    return None


def _this_thread() -> str:
    return f"thread {threading.current_thread().name!r}"


T = TypeVar("T")

CHECK_DELAY = 5.0  # seconds between two checks that the thread is alive
LONGEST_END = 1.0  # seconds for the thread to end its tasks, and for ``stop`` to wait for the thread

_turn = threading.Lock()
_current: Background | None = None
_inherited: list[Background] = []


class Background:
    """A background thread with an event loop."""

    def __init__(self) -> None:
        # Not from your application's event loop policy, whose loops may have their own clock.
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
        """Return the thread of this process, in use until :meth:`leave`."""
        global _current
        with _turn:
            if _current is None or not _current.is_alive:
                _current = cls()
            _current._users += 1
            return _current

    def leave(self) -> None:
        """Stop using the thread. It ends with its last user."""
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
        """True if the thread is running. The parent's thread does not run in a forked child."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def soon(self, callback: Callable[..., object], *args: Any) -> bool:
        """Call ``callback`` in the thread. Return False if the thread has ended."""
        return self.is_alive and call_soon(self.loop, callback, *args)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the thread and return the result. A cancellation cancels the work and waits for it to end.

        Raises the error of the work, and :class:`ConnectionResetError` if the thread has ended.
        """
        caller_loop = asyncio.get_running_loop()
        ended: asyncio.Future[asyncio.Task[T]] = caller_loop.create_future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self.loop.create_task(work()))
            tasks[0].add_done_callback(report)

        def report(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # mark the exception as retrieved, because the waiting task may be gone
            call_soon(caller_loop, _settle, ended, task)

        if not self.soon(begin):
            raise ConnectionResetError("the thread of the cluster locks has ended")
        cancelled: asyncio.CancelledError | None = None
        while not ended.done():
            try:
                await asyncio.wait((ended,), timeout=CHECK_DELAY)
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
        """Stop the thread now, even if it is still in use, and wait for it to end."""
        if self.soon(self.loop.stop) and threading.current_thread() is not self._thread:
            self._thread.join(LONGEST_END)


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> bool:
    """Call ``callback`` in an event loop of another thread. Return False if the loop is closed."""
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
    """Keep references to the parent's thread, loop and sockets: closing the sockets here would affect the parent."""
    global _current, _turn
    _turn = threading.Lock()
    if _current is not None:
        _inherited.append(_current)
        _current = None


def _stop_at_exit() -> None:
    """Close the sessions cleanly, and let the daemon thread finish writing its log record."""
    if (thread := _current) is not None:
        thread.stop()


in_forked_children(_forget_in_child)
atexit.register(_stop_at_exit)
