"""An event loop without a thread and without sockets: a scheduler calls its callbacks one at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from outboxio.testing.simulation.machine import Host

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FORGET_ENDED = 200  # tasks of a loop after which ended tasks are forgotten
REAL_ONLY = (
    "create_connection", "create_server", "create_datagram_endpoint", "create_unix_connection", "create_unix_server",
    "getaddrinfo", "getnameinfo", "sock_connect", "sock_accept", "sock_recv", "sock_sendall", "add_reader",
    "add_writer", "add_signal_handler", "connect_read_pipe", "connect_write_pipe", "subprocess_exec",
    "subprocess_shell",
)  # fmt: skip


class SimulatedLoop(asyncio.BaseEventLoop):
    """The callbacks of a simulated process that are ready, first in, first out as asyncio promises.

    The callbacks of a thread (``is_thread``) see no running event loop.
    """

    def __init__(self, host: Host, *, is_thread: bool = False) -> None:
        self.host = host
        self.is_thread = is_thread
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.problems: list[str] = []
        """What asyncio reports to the exception handler, such as an exception that nobody retrieves."""
        self._is_closed = False
        host.scheduler.loops.append(self)

    def __repr__(self) -> str:
        return f"<event loop of {self.host.name}>"

    def time(self) -> float:
        return self.host.scheduler.now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._require_open()
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._require_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.host.scheduler.push(when, self, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **options)
        # The coroutine of a killed process is kept: to free it would run its `finally` blocks.
        self.tasks.append(task)
        if len(self.tasks) > FORGET_ENDED:
            self.tasks = [each for each in self.tasks if not each.done()]
        return task

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """``asyncio.to_thread``: the call happens at once, after the time that a thread takes."""
        return self.host.in_thread(self, func, *args)

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True

    def stop(self) -> None:
        """Do nothing: the scheduler decides which loop runs."""

    def get_debug(self) -> bool:
        return False

    def get_exception_handler(self) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.host.is_alive:
            self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def shutdown_asyncgens(self) -> None: ...
    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The scheduler drops a cancelled timer when its time has come."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")


def _refuse(self: SimulatedLoop, *args: object, **options: object) -> Any:
    raise NotImplementedError(
        "a simulated event loop has no sockets, signals or child processes; give the handler a fake service"
    )


for _name in REAL_ONLY:
    setattr(SimulatedLoop, _name, _refuse)


def resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future its result or error, unless it is cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
