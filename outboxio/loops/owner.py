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
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

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
