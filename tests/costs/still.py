"""An event loop and a machine in which nothing depends on the speed of the computer.

Code takes no time: a turn of the event loop takes a microsecond, and the clock jumps to the next timer when nothing is
ready and no database has to answer. Answers are delivered only when no callback is left, and all at once. The jobs of
SQLite, of other threads and of the thread that holds the cluster locks run on this event loop. So the same program runs
the same callbacks in the same order, beside a real database too.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any, TypeVar

from outboxio.support import machine
from tests.costs.traffic import Traffic

T = TypeVar("T")

START = datetime(2030, 1, 1, 12, 0, 0, 123456)
TURN = 1e-6  # seconds that a turn of the event loop takes
TOGETHER = 5.0  # real seconds after which an answer no longer waits for other answers, which may wait for a lock
STUCK_AFTER = 60.0  # real seconds without an answer


class StillSelector(selectors.DefaultSelector):
    """Reads sockets only when no callback is ready, and waits for the answers to all requests."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.now = 0.0
        self._traffic = traffic

    def select(self, timeout: float | None = None) -> Any:
        self.now += TURN
        if timeout is not None and timeout <= 0:
            return []
        if self._awaited():
            return self._answers()
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is ready, no timer is set, and no database has to answer")
        if not ready:
            self.now += timeout or 0
        return sorted(ready, key=_by_number)

    def _answers(self) -> Any:
        """The events of the sockets, once each awaited socket has some."""
        began = time.monotonic()
        while True:
            ready = super().select(TOGETHER)
            waited = time.monotonic() - began
            if self._awaited() <= {key.fd for key, _ in ready} or (ready and waited > TOGETHER):
                return sorted(ready, key=_by_number)
            if waited > STUCK_AFTER:
                raise RuntimeError(f"a database has not answered for {STUCK_AFTER:.0f} s")
            time.sleep(0.0002)

    def _awaited(self) -> set[int]:
        """The sockets of this event loop on which a request or a connection is under way."""
        keys = self.get_map()
        return {
            key.fd for key in keys.values() if key.fd in self._traffic.awaited or key.events & selectors.EVENT_WRITE
        }


def _by_number(event: tuple[selectors.SelectorKey, int]) -> int:
    return event[0].fd


class StillLoop(asyncio.SelectorEventLoop):
    """The event loop. From its creation until it is closed, the clocks of outboxio are its clock."""

    def __init__(self, traffic: Traffic, seed: str) -> None:
        self._traffic, self._still = traffic, StillSelector(traffic)
        super().__init__(self._still)
        self._former = machine.use(StillMachine(self, traffic, seed))

    def _make_socket_transport(
        self, sock: socket.socket, protocol: asyncio.BaseProtocol, *args: Any, **rest: Any
    ) -> Any:
        self._traffic.opened(sock.fileno(), protocol)
        return super()._make_socket_transport(sock, protocol, *args, **rest)  # type: ignore[misc]  # of asyncio, not typed

    def time(self) -> float:
        return self._still.now

    def utc(self) -> datetime:
        """The clock of an outbox."""
        return START + timedelta(seconds=self._still.now)

    def close(self) -> None:
        if not self.is_closed():
            machine.use(self._former)
        super().close()


class StillMachine:
    """A machine with the clock of the event loop, known random numbers and no threads."""

    def __init__(self, loop: StillLoop, traffic: Traffic, seed: str) -> None:
        self._loop, self._traffic = loop, traffic
        self._random = random.Random(seed)
        self._kept: dict[str, Any] = {}
        self.monotonic = self.perf_counter = loop.time

    def time_ns(self) -> int:
        return int(1.9e18) + self.steady_ns()

    def steady_ns(self) -> int:
        return int(self._loop.time() * 1e9)

    def sleep(self, seconds: float) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(machine.REAL, name)

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2

    def random_bits(self) -> int:
        return self._random.getrandbits(64)

    def token(self, size: int) -> str:
        return self._random.randbytes(size).hex()

    def host(self) -> str:
        return "still"

    def pid(self) -> int:
        return 10_000

    async def call_in_thread(self, function: Callable[..., T], *args: Any, limiter: Any = None) -> T:
        await asyncio.sleep(0)
        return function(*args)

    def local(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[no-any-return]  # kept as Any

    def sqlite_thread(self, connect: Callable[[], sqlite3.Connection]) -> NoThread:
        return NoThread(connect, self._traffic)

    def background(self) -> OnLoop:
        return OnLoop(self._loop)


class NoThread:
    """Runs the jobs of a SQLite connection at once. The answers come in a later turn of the event loop."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], traffic: Traffic) -> None:
        self._connect, self._traffic = connect, traffic
        self._connection: sqlite3.Connection | None = None

    def put(self, work: Callable[[sqlite3.Connection], Any] | None, answer: Callable[[Any, Any], object], /) -> None:
        try:
            result, failure = self.run_blocking(work), None
        except BaseException as error:  # every error belongs to the waiting task
            result, failure = None, error
        answer(result, failure)

    def run_blocking(self, work: Callable[[sqlite3.Connection], Any] | None, /) -> Any:
        connection = self._connection
        if work is None:
            self._connection = None
            if connection is not None:
                connection.close()
            return None
        if connection is None:
            connection = self._connection = self._connect()
            connection.execute("PRAGMA synchronous = OFF").close()  # each commit would wait for the disk
        before = connection.total_changes
        try:
            return work(connection)
        finally:
            self._traffic.rows_written += connection.total_changes - before


class OnLoop:
    """The thread of the cluster locks, on the event loop of the application."""

    is_alive = True

    def __init__(self, loop: StillLoop) -> None:
        self.loop = loop

    def leave(self) -> None: ...

    def stop(self) -> None: ...

    def soon(self, callback: Callable[..., object], *args: Any) -> bool:
        self.loop.call_soon(callback, *args)
        return True

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Awaitable[T]:
        return self.loop.create_task(work())
