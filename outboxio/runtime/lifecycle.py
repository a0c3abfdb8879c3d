"""The lifecycle of an outbox: entering and leaving ``running()``, draining, closing.

The lifespan of a web application runs the outbox for as long as the application runs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import astuple

from outboxio.actions.executor import refuse_in_handler, refuse_in_transaction
from outboxio.errors import OutboxError, RegistrationError
from outboxio.handlers.finding_hooks import FindingHook
from outboxio.handlers.handler import Handler
from outboxio.loops.log_limiter import flush_limiters
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.envelope import handler_around
from outboxio.runtime.environment import Drained, Roles
from outboxio.runtime.running import Leave, Running
from outboxio.runtime.shard import ShardRuntime
from outboxio.support.aio import run_to_completion
from outboxio.support.duration import parse_duration
from outboxio.support.log import log_of, type_name

if TYPE_CHECKING:
    from outboxio.health.values import Phase

logger = log_of(__name__)

_NO_LIMIT = timedelta(days=36_500)


class Closes(Protocol):
    async def close(self) -> None: ...


class Lifecycle:
    """Starts and stops the shards of an outbox."""

    def __init__(
        self, outbox: object, shards: Mapping[str, ShardRuntime], parts: Sequence[Closes], guard: EventLoopGuard,
        hooks: Mapping[str, FindingHook],
    ) -> None:  # fmt: skip
        """``outbox``: used to detect calls inside a handler or transaction. ``parts``: closed before the shards."""
        self._parts = parts
        self._outbox = outbox
        self._shards = shards
        self._guard = guard
        self._hooks = hooks
        self._running: Running | None = None
        self._leaving: Running | None = None
        self._turn = asyncio.Lock()
        guard.when_taken_over(self._reset)

    def _reset(self) -> None:
        self._turn = asyncio.Lock()
        self._running = self._leaving = None
        for shard in self._shards.values():
            shard.reset()

    @property
    def _changing(self) -> asyncio.Lock:
        """The lock for entering, leaving, closing, and draining without ``running()``."""
        self._guard.enter()
        return self._turn

    @property
    def _is_running(self) -> bool:
        return self._running is not None and not self._running.is_over

    @property
    def _with_one_writer(self) -> list[str]:
        """The shards with a single writer, whose loops wait for any open transaction."""
        return [name for name, shard in self._shards.items() if shard.database.has_one_writer]

    @property
    def running(self) -> Running | None:
        """The run that is starting, active or stopping; ``None`` outside of ``running()``."""
        return self._leaving or self._running

    @property
    def phase(self) -> Phase:
        """The phase of ``running()``."""
        if self._leaving is not None:
            return "leaving"
        if self._running is None:
            return "stopped"
        return "running" if self._running.has_begun else "starting"

    def refuse_while_running(self) -> None:
        """Raise :class:`RegistrationError` inside ``running()``."""
        if self._is_running:
            raise RegistrationError("handlers must be registered before running() is entered")

    async def enter(self, roles: Roles) -> Leave:
        """Begin a block of ``running()``, and return a function that ends it."""
        if handler_around(self._outbox) is not None and self._running is not None and self._is_running:
            self._running.require(roles)
            return _nothing_to_leave
        refuse_in_handler(self._outbox, "outbox.running()", "enter it where this outbox is run or drained from")
        self._refuse_in_transaction("outbox.running()", "enter it before the transaction begins")
        async with self._changing:
            if self._running is not None and self._is_running:
                self._running.join(roles)
                return self._leave
            running = self._running = Running(list(self._shards.values()), roles, self._hooks)
            try:
                await running.start()
            except BaseException:
                self._running = None
                raise
        return self._leave

    async def _leave(self) -> None:
        async with self._changing:
            if self._running is None:
                return
            if self._running.is_in_last_block:
                fix = "let the task that runs the outbox leave it: set an asyncio.Event here that it waits for"
                refuse_in_handler(self._outbox, "leaving outbox.running()", fix)
                self._refuse_in_transaction("leaving outbox.running()", fix)
            if self._running.release():
                await self._stop()

    async def close(self) -> None:
        """End ``running()``, and close every connection that the outbox has opened."""
        fix = "let the task that runs the outbox close it: set an asyncio.Event here that it waits for"
        refuse_in_handler(self._outbox, "outbox.close()", fix)
        refuse_in_transaction(self._outbox, "outbox.close()", fix)
        async with self._changing:
            try:
                await self._stop()
            finally:
                errors = await self._close_handlers()
                for part in (*self._parts, *self._shards.values()):
                    await part.close()
                flush_limiters()
                self._guard.leave()
            if errors:
                raise errors[0] if len(errors) == 1 else ExceptionGroup("handlers could not be closed", errors)

    async def _close_handlers(self) -> list[Exception]:
        """Close the handler objects concurrently; return the errors of those that could not be closed."""
        environment = next(iter(self._shards.values())).environment
        limit = environment.settings.shutdown_timeout.total_seconds()
        closing = [close_handler(handler, limit) for handler in environment.handlers if handler.close is not None]
        return [error for error in await asyncio.gather(*closing) if error is not None]

    async def drain(self, timeout: timedelta | float | str | None) -> Drained:
        """See ``Outbox.drain``."""
        fix = "drain it from outside; what is emitted here is handled when this has ended"
        refuse_in_handler(self._outbox, "outbox.drain()", fix)
        self._refuse_in_transaction("outbox.drain()", fix)
        longest = _NO_LIMIT if timeout is None else parse_duration(timeout, key="drain timeout")
        deadline = self._guard.enter().time() + longest.total_seconds()
        done: list[Drained] = []
        while True:
            running = self._running
            if running is not None and running.has_begun and not running.is_over:
                done += await self._drain_shards(deadline)
                if self._running is running:
                    break
            async with self._changing:
                if not self._is_running:
                    done += await self._drain_shards(deadline)
                    break
        return Drained(*(sum(numbers) for numbers in zip(*map(astuple, done), strict=True)))

    async def _drain_shards(self, deadline: float) -> list[Drained]:
        from outboxio.runtime.drain import drain_shard

        return [await drain_shard(shard, deadline) for shard in self._shards.values()]

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._leaving = running
            try:
                await running.stop()
            finally:
                self._leaving = None

    def _refuse_in_transaction(self, call: str, fix: str) -> None:
        refuse_in_transaction(self._outbox, call, fix, self._with_one_writer)


async def close_handler(handler: Handler, limit: float) -> Exception | None:
    """Close a handler object within ``limit`` seconds; return the error, or ``None``."""
    assert handler.close is not None
    try:
        async with asyncio.timeout(limit):
            closing = handler.close()
            if inspect.isawaitable(closing):
                await closing
    except Exception as error:
        error.add_note(f"raised by close() of handler {handler.name!r} ({handler.where})")
        return error
    return None


async def _nothing_to_leave() -> None:
    return None


OuterLifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]


class Runs(Protocol):
    """The outbox, for a lifespan."""

    def running(self) -> AbstractAsyncContextManager[object]: ...

    async def close(self) -> None: ...


class Lifespan:
    """``FastAPI(lifespan=outbox.lifespan)``, or ``Starlette(...)``: ``running()`` from application startup to
    its end.

    Sets ``app.state.outbox``. At the end the outbox is closed as well, unless it was in use before the application
    started. The lifespan does not migrate: call ``await outbox.migrate()`` when you deploy, or in your own
    lifespan.
    """

    def __init__(self, outbox: Runs, guard: EventLoopGuard, outer: OuterLifespan | None = None) -> None:
        self._outbox = outbox
        self._guard = guard
        self._outer = outer

    def within(self, outer: OuterLifespan) -> Lifespan:
        """Run the outbox inside your own lifespan, whose state is passed on.

        ``outer`` is entered first and left last, so handlers can use the objects that it opens until the last handler
        has ended.

        Example::

            @asynccontextmanager
            async def mine(app: FastAPI) -> AsyncGenerator[None]:
                await outbox.migrate()
                async with mailer:
                    yield

            app = FastAPI(lifespan=outbox.lifespan.within(mine))
        """
        return Lifespan(self._outbox, self._guard, outer)

    def __call__(self, app: Any) -> AbstractAsyncContextManager[Any]:
        """Return the lifespan context, which yields the state of the outer lifespan, or ``None``.

        Entering and leaving raise the errors of ``running()``. An outboxio error at startup is logged in one line and
        raised without the traceback of the driver, because frameworks print the whole traceback.
        """
        return self._lifespan(app)

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncGenerator[Mapping[str, Any] | None]:
        is_ours = not self._guard.is_bound
        has_started = False
        try:
            async with AsyncExitStack() as stack:
                state = None if self._outer is None else await stack.enter_async_context(self._outer(app))
                try:
                    if hasattr(app, "state"):
                        app.state.outbox = self._outbox
                    async with self._outbox.running():
                        has_started = True
                        yield state
                finally:
                    if is_ours:
                        await run_to_completion(self._outbox.close())
        except OutboxError as error:
            if has_started:
                raise
            # The framework would print a hundred lines of traceback from SQLAlchemy and the driver.
            logger.critical("the application cannot start: %s", str(error), error_type=type_name(error))
            logger.debug("the application cannot start", exc_info=error)
            raise error.with_traceback(None) from None
