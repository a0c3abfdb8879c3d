"""The machine of a simulated process: virtual clocks, seeded randomness, SQLite in virtual time, and cluster locks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections import deque
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, Protocol, TypeVar, cast

from outboxio.loops.owner import Background
from outboxio.model.lock_name import LockName
from outboxio.storage.sqlite.connection import Work
from outboxio.testing.simulation.loop import Scheduler, SimulatedLoop, resolve
from outboxio.testing.simulation.properties import record_writer

T = TypeVar("T")

START = 1_767_225_600  # 2026-01-01, in seconds since 1970: the wall time at which each simulation begins
BUSY_FOR = 5.0  # virtual seconds for which a job waits for the write lock, as in a real process
BUSY_AGAIN = (0.0005, 0.004)  # a job retries after a number of seconds in this range

Answer = Callable[[Any, BaseException | None], object]


class Disk:
    """The database file that all processes share, its cluster locks, and its current faults."""

    def __init__(self, path: str, lock_silence: float | None) -> None:
        """``lock_silence``: the seconds after which an unresponsive process loses its locks, as on a server."""
        self.path = path
        self.lock_silence = lock_silence
        self.locks: dict[str, SimulatedLock] = {}
        self.is_stopped = self.is_read_only = False
        self.when_lost: Callable[[Host], object] | None = None
        """Called with a process that has just lost a lock to another process."""
        self.errors = 0.0
        """The share of jobs that fail."""
        self.wall_shift = self.most_shifted = 0.0
        """Seconds by which the wall clock has jumped. All processes that can open a file have the same clock."""

    def move_clock(self, by: float) -> None:
        self.wall_shift += by
        self.most_shifted = max(self.most_shifted, self.wall_shift)

    def holder(self, namespace: str, handler: str) -> str | None:
        """Return the process that holds the lock of a handler."""
        held = self.locks.get(_lock_of(namespace, handler))
        return None if held is None else held.host.name


class Call(Protocol):
    """A call by the scenario into a process."""

    def killed(self) -> None:
        """Handle the death of the process before the call has ended."""
        ...


class Host:
    """A simulated operating system process: its event loop, its threads, its randomness and its faults."""

    def __init__(self, scheduler: Scheduler, disk: Disk, name: str, pid: int, seed: str) -> None:
        self.scheduler, self.disk, self.name, self.pid = scheduler, disk, name, pid
        self.random = random.Random(seed)
        self.locals: dict[str, Any] = {}
        self.is_alive, self.is_frozen, self.is_blocked = True, False, False
        self.is_cut_off = False
        """True while no statement of the process reaches the database."""
        self.answers_after = 0.0
        """The delay of the database's answers, in seconds."""
        self.slowness = 0.0
        """Seconds that each callback takes."""
        self.free_at = 0.0
        self.steps = 0
        self.after_step: Callable[[], object] | None = None
        """Called between two steps of this process."""
        self.died_at: float | None = None
        self.connections: list[SimulatedThread] = []
        self.calls: dict[Call, None] = {}
        """The calls of the scenario into this process that are in progress."""
        self.loop = SimulatedLoop(self)
        self.threads = SimulatedLoop(self, is_thread=True)

    @property
    def has_callbacks(self) -> bool:
        """True while a callback is ready, or an answer of the database is delayed."""
        return bool(self.loop.ready or self.threads.ready or self.answers_after)

    def raised_term(self, lease: str) -> None:
        """Note that the process has raised the term of a lease."""
        for lock in self.disk.locks.values():
            if lock.host is self and lock.lease == lease:
                lock.proven_at = self.scheduler.now

    def may_run(self, now: float) -> bool:
        return self.is_alive and not self.is_frozen and not self.is_blocked and self.free_at <= now

    def stepped(self, now: float) -> None:
        self.steps += 1
        if self.slowness:
            self.free_at = now + self.slowness

    def kill(self) -> None:
        """End without running any further code: SQLite rolls back, and locks are released."""
        self.is_alive, self.died_at = False, self.scheduler.now
        for connection in self.connections:
            connection.cut()
        for name in [name for name, lock in self.disk.locks.items() if lock.host is self]:
            del self.disk.locks[name]
        for call in list(self.calls):
            call.killed()

    def call(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Start a task in this process."""
        self.loop.call_soon(lambda: self.loop.create_task(work()))

    def in_thread(self, loop: asyncio.AbstractEventLoop, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call a function in a thread of this process after a delay."""
        ended: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            result: Any = None
            problem: BaseException | None = None
            try:
                result = function(*args)
            except BaseException as error:
                problem = error
            loop.call_soon_threadsafe(resolve, ended, result, problem)

        self.later(call)
        return ended

    def later(self, call: Callable[[], object], after: float | None = None) -> None:
        """Call in a thread after ``after`` seconds, by default after the time that a thread takes."""
        scheduler = self.scheduler
        delay = scheduler.latency() if after is None else after
        scheduler.push(scheduler.now + delay, self.threads, asyncio.Handle(call, (), self.threads))


class SimulatedMachine:
    """Provides the clocks and the randomness of the process whose callback runs; installed with
    ``outboxio.support.machine.use``."""

    def __init__(self, scheduler: Scheduler, outside: Host) -> None:
        """``outside``: the host of code that does not run in a process."""
        self._scheduler = scheduler
        self._outside = outside

    @property
    def _host(self) -> Host:
        return self._scheduler.running or self._outside

    def monotonic(self) -> float:
        return self._scheduler.now

    perf_counter = monotonic

    def time_ns(self) -> int:
        return START * 10**9 + round((self._scheduler.now + self._outside.disk.wall_shift) * 1e9)

    def steady_ns(self) -> int:
        return round(self._scheduler.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self._scheduler.now += seconds

    def uniform(self, low: float, high: float) -> float:
        return self._host.random.uniform(low, high)

    def random_bits(self) -> int:
        return self._host.random.getrandbits(64)

    def token(self, size: int) -> str:
        return self._host.random.randbytes(size).hex()

    def host(self) -> str:
        return "simulated"

    def pid(self) -> int:
        return self._host.pid

    def local(self, key: str, make: Callable[[], T]) -> T:
        found = self._host.locals
        if key not in found:
            found[key] = make()
        return cast(T, found[key])

    async def call_in_thread(self, function: Callable[..., T], *args: Any, limiter: Any = None) -> T:
        return await self._host.in_thread(asyncio.get_running_loop(), function, *args)

    def sqlite_thread(self, connect: Callable[[], sqlite3.Connection]) -> SimulatedThread:
        return SimulatedThread(self._host, connect)

    def file_locks(self, path: str) -> SimulatedLocks:
        return SimulatedLocks(self._host)

    def background(self) -> NoBackground:
        return NoBackground(SimulatedLoop(self._host))


class SimulatedThread:
    """A SQLite connection whose jobs run in order, each after a delay; they wait for the write lock in virtual time."""

    def __init__(self, host: Host, connect: Callable[[], sqlite3.Connection]) -> None:
        self._host, self._connect = host, connect
        self._jobs: deque[tuple[Work[Any] | None, Answer]] = deque()
        self._sqlite: sqlite3.Connection | None = None
        self._gives_up_at: float | None = None
        self._is_serving = False
        host.connections.append(self)

    @property
    def is_open(self) -> bool:
        return self._sqlite is not None

    @property
    def is_busy(self) -> bool:
        """True while a job waits or runs."""
        return bool(self._jobs)

    def put(self, work: Work[Any] | None, answer: Answer, /) -> None:
        self._jobs.append((work, answer))
        if not self._is_serving and self._host.is_alive:
            self._serve_later()

    def run_blocking(self, work: Work[T]) -> T:
        """Block the event loop of this process while the database is busy; other processes continue."""
        scheduler = self._host.scheduler
        while self._jobs:
            self._serve()
        gives_up_at = scheduler.now + BUSY_FOR
        while True:
            try:
                return work(self._opened())
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or scheduler.now > gives_up_at:
                    raise
            scheduler.step_others(self._host)

    def cut(self) -> None:
        """Close the connection without running its jobs, because the process was killed."""
        self._jobs.clear()
        if self._sqlite is not None:
            with contextlib.suppress(sqlite3.Error):
                self._sqlite.rollback()  # a cursor still in memory keeps the locks of a closed connection
                self._sqlite.close()
            self._sqlite = None

    def _serve_later(self, after: float | None = None) -> None:
        self._is_serving = True
        self._host.later(self._serve, after)

    def _serve(self) -> None:
        """Run the first job, as the thread would."""
        self._is_serving = False
        if not self._jobs:
            return
        work, answer = self._jobs[0]
        result: Any = None
        failure: BaseException | None = None
        try:
            result = self._do(work)
        except sqlite3.OperationalError as error:
            scheduler = self._host.scheduler
            if _is_busy(error):
                self._gives_up_at = self._gives_up_at or scheduler.now + BUSY_FOR
                if scheduler.now < self._gives_up_at:
                    return self._serve_later(scheduler.random.uniform(*BUSY_AGAIN))
            failure = error
        except BaseException as error:  # every error belongs to the waiting task
            failure = error
        self._gives_up_at = None
        self._jobs.popleft()
        if self._host.answers_after:
            self._host.later(lambda: answer(result, failure), self._host.answers_after)
        else:
            answer(result, failure)
        if self._jobs:
            self._serve_later()

    def _do(self, work: Work[Any] | None) -> Any:
        if work is None:
            return self.cut_connection()
        host, disk = self._host, self._host.disk
        if host.is_cut_off or disk.is_stopped or (disk.errors and host.scheduler.random.random() < disk.errors):
            if self._sqlite is not None:
                self._sqlite.rollback()  # as SQLite does for this error
            raise _error("disk I/O error", sqlite3.SQLITE_IOERR)
        sqlite = self._opened()
        if not disk.is_read_only:
            return work(sqlite)
        sqlite.execute("PRAGMA query_only = ON").close()
        try:
            return work(sqlite)
        finally:
            with contextlib.suppress(sqlite3.Error):
                sqlite.execute("PRAGMA query_only = OFF").close()

    def cut_connection(self) -> None:
        if self._sqlite is not None:
            self._sqlite.close()
            self._sqlite = None

    def _opened(self) -> sqlite3.Connection:
        if self._sqlite is None:
            self._sqlite = self._connect()
            prepare(self._sqlite, self._host)
        return self._sqlite


def prepare(sqlite: sqlite3.Connection, host: Host) -> None:
    """Make a connection deterministic and cheap, and record for the triggers which process writes."""
    sqlite.execute("PRAGMA busy_timeout = 0").close()  # jobs wait in virtual time
    sqlite.execute("PRAGMA synchronous = OFF").close()
    sqlite.create_function("random", 0, lambda: host.random.getrandbits(64) - (1 << 63))
    record_writer(sqlite, host.scheduler, host.name, host.disk.holder, host.raised_term)


class SimulatedLock:
    """A cluster lock: held until it is released, or its process dies or is unresponsive for ``lock_silence``."""

    def __init__(self, host: Host, name: LockName) -> None:
        self.host, self.name, self.lease = host, name.text, name.lease
        self.ends_by_silence = name.role != "lock"
        self.proven_at: float | None = None
        """When the process last looked at the lock or raised its term. Up to then the lock was not lost: on a server, a
        process that has lost the lock cannot raise the term."""

    @property
    def is_ours(self) -> bool:
        if self.host.disk.locks.get(self.name) is not self:
            return False
        self.proven_at = self.host.scheduler.now
        return True

    @property
    def is_over(self) -> bool:
        silence = self.host.disk.lock_silence
        if silence is None or self.proven_at is None or not self.ends_by_silence:
            return False
        return self.host.scheduler.now - self.proven_at > silence

    def release(self) -> None:
        if self.host.disk.locks.get(self.name) is self:
            del self.host.disk.locks[self.name]

    end = release


class SimulatedLocks:
    """The cluster locks of the database, as a process sees them."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def take(self, name: LockName) -> SimulatedLock | None:
        locks = self._host.disk.locks
        former = locks.get(name.text)
        if former is not None:
            if not former.is_over:
                return None
            self._host.scheduler.note(former.host, f"** loses lock {name.text}, because it is unresponsive")
            if self._host.disk.when_lost is not None:
                self._host.disk.when_lost(former.host)
        lock = locks[name.text] = SimulatedLock(self._host, name)
        return lock

    def reset(self) -> None:
        for lock in [lock for lock in self._host.disk.locks.values() if lock.host is self._host]:
            lock.release()


class NoBackground(Background):
    """The thread that watches for a blocked event loop: a simulated event loop is never blocked by accident."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop = loop

    @property
    def is_alive(self) -> bool:
        return True

    def leave(self) -> None: ...

    def stop(self) -> None: ...

    def soon(self, callback: Callable[..., object], *args: Any) -> bool:
        return True


@cache
def _lock_of(namespace: str, handler: str) -> str:
    return LockName(namespace, "dispatch", handler).text


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error
