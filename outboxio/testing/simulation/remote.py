"""Objects of a simulated process, as a scenario uses them: each call runs in the process, and the scenario waits."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from outboxio.testing.simulation.loop import resolve

if TYPE_CHECKING:
    from outboxio.testing.simulation.machine import Host

Call = Callable[[], Any]
PLAIN = frozenset({str, bytes, int, float, bool, type(None), list, dict, tuple, set, frozenset})


class ProcessKilled(Exception):
    """The process was killed while the scenario waited for a call."""


class Place(Protocol):
    """Where an object of a process lives."""

    @property
    def host(self) -> Host: ...

    def find(self) -> Any:
        """Return the object."""
        ...

    async def run(self, call: Call) -> Any:
        """Run a call in the process, and await its result if that is awaitable."""
        ...


class Remote:
    """A proxy for an object of a process. In the process itself it is the object.

    Methods are called in the process. A coroutine is awaited there, and an asynchronous context manager is entered and
    left there, by one task. So ``await process.outbox.execute(action)`` and ``async with
    process.outbox.transaction(...) as tx`` work as they do in the process.
    """

    def __init__(self, place: Place, path: tuple[str, ...] = ()) -> None:
        self._place, self._path = place, path

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # isinstance() holds
        return self._find().__class__

    def __getattr__(self, name: str) -> Any:
        value: Any = getattr(self._find(), name)
        host = self._place.host
        if host.scheduler.running is host or type(value) in PLAIN:
            return value
        found = Remote(self._place, (*self._path, name))
        return found._call if inspect.isroutine(value) else found

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)

    def __repr__(self) -> str:
        return f"<{self._find()!r} of {self._place.host.name}>"

    def _find(self) -> Any:
        found = self._place.find()
        for name in self._path:
            found = getattr(found, name)
        return found

    def _call(self, *args: Any, **options: Any) -> Any:
        function = self._find()

        def call() -> Any:
            return self._find()(*args, **options)

        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            return self._place.run(call)
        host = self._place.host
        leave = host.scheduler.enter(host, host.loop)
        try:
            result = function(*args, **options)
        finally:
            leave()
        if hasattr(result, "__aenter__"):
            return RemoteBlock(self._place, call)
        return self._place.run(lambda: result) if inspect.isawaitable(result) else result


class RemoteBlock:
    """An asynchronous context manager of a process. One task of the process enters it, serves its calls and leaves it.

    It is the :class:`Place` of the block's value.
    """

    _host: Host

    def __init__(self, place: Place, make: Call) -> None:
        self._place, self._make = place, make
        self._jobs: deque[tuple[Call | None, _Answer]] = deque()
        self._came: asyncio.Future[None] | None = None
        self._value: Any = None

    @property
    def host(self) -> Host:
        return self._host

    def find(self) -> Any:
        return self._value

    async def run(self, call: Call) -> Any:
        return await self._submit(call)

    async def __aenter__(self) -> Any:
        await self._place.run(lambda: None)  # restarts a killed process
        self._host = self._place.host
        self._host.calls[self] = None  # no fault hits the process until the block ends
        entered = _Answer(self._host)
        self._host.call(lambda: self._serve(entered))
        value = self._value = await entered
        return value if type(value) in PLAIN else Remote(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        def leave(error: BaseException) -> Any:
            raise _Leave(error)

        try:
            await self._submit(None if error is None else partial(leave, error))
        except BaseException as raised:
            if raised is error:
                return False
            raise
        finally:
            self._host.calls.pop(self, None)
        return error is not None

    def killed(self) -> None:
        """Do nothing: the next call of the block raises."""

    def _submit(self, job: Call | None) -> _Answer:
        answer = _Answer(self._host)
        if not self._host.is_alive:
            answer.killed()
        self._jobs.append((job, answer))
        if self._came is not None:
            self._host.loop.call_soon(_wake, self._came)
        return answer

    async def _serve(self, entered: _Answer) -> None:
        """Enter the block, serve its calls and leave it, as one task of the process."""
        answer = entered
        try:
            async with self._make() as value:
                entered.give(value, None)
                while True:
                    while not self._jobs:
                        self._came = self._host.loop.create_future()
                        await self._came
                    job, answer = self._jobs.popleft()
                    if job is None:
                        break
                    await _do(job, answer)
        except BaseException as error:
            answer.give(None, error)
        else:
            answer.give(None, None)


class _Leave(Exception):
    """The scenario left the block with an exception."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Answer:
    """The awaitable result of a call in a process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._home = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] = self._home.create_future()
        host.calls[self] = None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._future.__await__()

    def give(self, result: Any, error: BaseException | None) -> None:
        if self._host.calls.pop(self, self) is None:
            self._home.call_soon_threadsafe(resolve, self._future, result, error)

    def killed(self) -> None:
        self.give(None, ProcessKilled(f"process {self._host.name} was killed during the call"))


async def in_process(host: Host, call: Call) -> Any:
    """Call a function in a new task of a process. Raises :class:`ProcessKilled` if the process dies first."""
    answer = _Answer(host)
    host.call(lambda: _do(call, answer))
    return await answer


async def _do(call: Call, answer: _Answer) -> None:
    try:
        result = call()
        if inspect.isawaitable(result):
            result = await result
    except _Leave as leave:
        raise leave.error from None
    except BaseException as error:
        answer.give(None, error)
    else:
        answer.give(result, None)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
