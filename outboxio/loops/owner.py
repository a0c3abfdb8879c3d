"""The event loop guard: an outbox works in a single event loop at a time.

Connections, futures and locks belong to the event loop that made them. Suppose that two event loops used an outbox at
the same time. The outbox would give the connections of the first loop to the second loop, or would forget the
connections. On SQLite both loops would write in the same transaction. On a server a task in the first loop would wait
for ever.

So the first use binds the outbox to the running loop, and a second loop is refused for as long as the first loop may
come back. This module is the only owner of that rule. An object that holds connections, futures or locks asks the guard
at each use, and begins anew when a second loop takes over.

The same holds for a forked child process, which has copies of all connections: if the parent had opened the outbox, the
guard refuses every use in the child (decision 57).

A thread with an event loop, for work that goes on while the application's event loop stands still.

A process has at most a single such thread, from the first ``enlist`` to the last ``leave``. The thread is a daemon, and
a forked child has no thread, so the thread never keeps an interpreter from exiting.
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
_BeginAnew = Callable[[], object]

_of_parents: list[object] = []
"""Holders of a parent process's connections. They stay here for ever: an object that closes a copy of a connection in a
forked child may end the parent's connection."""


class EventLoopGuard:
    """Binds an outbox to the event loop that uses the outbox, and refuses every second loop.

    A second loop takes over in these cases: the former loop is closed (``asyncio.run`` once more, a loop for each
    test), or is garbage; or the outbox was closed. A forked child may use an outbox that its parent had not opened, or
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
        self._members: list[weakref.WeakMethod[_BeginAnew]] = []
        _guards.add(self)

    @classmethod
    def of_shard(cls, name: str) -> EventLoopGuard:
        """A guard of a database that is used without an outbox."""
        return cls(f"shard {name!r}")

    def when_taken_over(self, begin_anew: _BeginAnew) -> None:
        """Call this method whenever an event loop takes over, including the first loop.

        The method forgets the objects that belong to an event loop. The guard does not keep the method's object alive.
        """
        self._members = [member for member in self._members if member() is not None]
        self._members.append(weakref.WeakMethod(begin_anew))

    def enter(self) -> _Loop:
        """The running event loop, to which the outbox is bound from now on.

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
        """The event loop that the outbox is bound to, possibly closed by now; ``None`` without such a loop."""
        return self._owner()

    @property
    def is_bound(self) -> bool:
        """True if the outbox was used, and neither the outbox nor the event loop is closed."""
        owner = self._owner()
        return owner is not None and not owner.is_closed()

    def refuse_in_child(self) -> None:
        """Raise :class:`WrongProcess` in a forked child whose parent had opened the outbox."""
        if self._opened_in is not None:
            raise WrongProcess(self._subject, self._opened_in, machine.pid())

    def leave(self) -> None:
        """The outbox is closed, so the next event loop may use the outbox."""
        with self._taking:
            self._owner = _nobody

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` in the event loop that the outbox is bound to, from any thread."""
        if (owner := self._owner()) is not None:
            with suppress(RuntimeError):  # the loop was closed just now
                owner.call_soon_threadsafe(callback)

    def _take(self, loop: _Loop) -> None:
        with self._taking:
            self.refuse_in_child()
            owner = self._owner()
            if owner is not None and owner is not loop and not owner.is_closed():
                raise WrongEventLoop(self._subject, self._describe_owner(), f"in that of {_this_thread()}")
            if self._former() is not loop:
                for member in self._members:
                    if (begin_anew := member()) is not None:
                        begin_anew()
            self._owner = self._former = weakref.ref(loop)
            self._thread, self._process = _this_thread(), machine.pid()

    def begin_child(self) -> None:
        """This process is a forked child. Nothing of the parent's is closed, and no event loop is asked."""
        self._taking = threading.Lock()  # a thread of the parent may have held the lock
        if self._owner is not _nobody:
            self._opened_in = self._process
            _of_parents.append([member() for member in self._members])
        self._owner = self._former = _nobody

    def _describe_owner(self) -> str:
        owner = self._owner()
        if owner is None:
            return "no event loop yet"
        state = "runs" if owner.is_running() else "does not run at the moment, and was not closed"
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
