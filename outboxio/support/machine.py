"""Clocks, randomness, identity and threads of this machine: everything that is not deterministic.

The engine uses nothing of this kind directly, so that a simulation of several processes can replace everything with
:func:`use`. Import the module, not its names, because :func:`use` rebinds them::

    from outboxio.support import machine

    began = machine.monotonic()
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

from anyio import CapacityLimiter, to_thread

T = TypeVar("T")


def in_forked_children(forget: Callable[[], object]) -> None:
    """Call ``forget`` in every forked child of this process, before any other code."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=forget)


class Machine(Protocol):
    """A source of everything that is not deterministic."""

    def monotonic(self) -> float: ...

    def perf_counter(self) -> float: ...

    def time_ns(self) -> int:
        """The wall clock: nanoseconds since 1970."""
        ...

    def steady_ns(self) -> int:
        """Nanoseconds of a clock that cannot be set and that includes the time while the machine sleeps."""
        ...

    def sleep(self, seconds: float, /) -> object:
        """Block the calling thread."""
        ...

    def uniform(self, low: float, high: float, /) -> float: ...

    def random_bits(self) -> int:
        """64 random bits from the operating system."""
        ...

    def token(self, size: int, /) -> str:
        """``size`` random bytes, in hex."""
        ...

    def host(self) -> str: ...

    def pid(self) -> int: ...

    def call_in_thread(
        self, function: Callable[..., T], *args: Any, limiter: CapacityLimiter | None = None
    ) -> Awaitable[T]:
        """Call ``function`` in a worker thread, with the caller's context variables."""
        ...

    def local(self, key: str, make: Callable[[], T], /) -> T:
        """Return the object with this key that exists once per process; the first call creates it."""
        ...

    # Their types are defined in modules that import this module, so they are Any. ``None``: the default.

    @property
    def sqlite_thread(self) -> Callable[[Callable[[], Any]], Any] | None:
        """Creates a ``SqliteThread`` from the function that opens its connection."""
        ...

    @property
    def file_locks(self) -> Callable[[str], Any] | None:
        """Creates the ``Locks`` of a SQLite file from its path."""
        ...

    @property
    def background(self) -> Callable[[], Any] | None:
        """Returns the ``Background`` of this process, kept until ``leave()``."""
        ...


_randoms: Iterator[int] = iter(())
_AT_ONCE = struct.Struct("256Q")  # a system call for each id would take most of its time


def _random_bits() -> int:
    global _randoms
    for bits in _randoms:
        return bits
    _randoms = iter(_AT_ONCE.unpack(os.urandom(_AT_ONCE.size)))
    return next(_randoms)


def _forget() -> None:
    """Discard the random bits in a forked process, which must not reuse those of its parent."""
    global _randoms
    _randoms = iter(())


in_forked_children(_forget)


def _steady_clock() -> Callable[[], int]:
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):  # on Linux only the first includes sleep, on macOS the second
        if hasattr(time, name):
            return partial(time.clock_gettime_ns, getattr(time, name))
    return time.perf_counter_ns


class _Real:
    """This machine. The functions are those of the standard library, so calls have no overhead."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    time_ns = staticmethod(time.time_ns)
    steady_ns = staticmethod(_steady_clock())
    sleep = staticmethod(time.sleep)
    uniform = staticmethod(random.uniform)
    random_bits = staticmethod(_random_bits)
    token = staticmethod(secrets.token_hex)
    host = staticmethod(socket.gethostname)
    pid = staticmethod(os.getpid)
    sqlite_thread = None
    file_locks = None
    background = None

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def call_in_thread(
        self, function: Callable[..., T], *args: Any, limiter: CapacityLimiter | None = None
    ) -> Awaitable[T]:
        return to_thread.run_sync(function, *args, limiter=limiter)

    def local(self, key: str, make: Callable[[], T], /) -> T:
        # Each key has one type of value, which the type of the dictionary cannot express.
        try:
            return self._kept[key]  # type: ignore[no-any-return]
        except KeyError:
            return self._kept.setdefault(key, make())  # type: ignore[no-any-return]  # another thread may be faster


REAL: Machine = _Real()

_current = REAL
monotonic = REAL.monotonic
perf_counter = REAL.perf_counter
time_ns = REAL.time_ns
steady_ns = REAL.steady_ns
sleep = REAL.sleep
uniform = REAL.uniform
random_bits = REAL.random_bits
token = REAL.token
host = REAL.host
pid = REAL.pid
call_in_thread = REAL.call_in_thread
local = REAL.local
sqlite_thread = REAL.sqlite_thread
file_locks = REAL.file_locks
background = REAL.background


def use(other: Machine) -> Machine:
    """Replace the current machine by ``other``; return the previous one.

    Example::

        former = machine.use(simulated)
        try:
            ...
        finally:
            machine.use(former)
    """
    global _current
    former, _current = _current, other
    globals().update((name, getattr(other, name)) for name in vars(Machine) if not name.startswith("_"))
    return former
