"""The lifespan of a web application: the outbox runs for as long as the application runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from outboxio.errors import OutboxError
from outboxio.loops.owner import EventLoopGuard
from outboxio.support.aio import to_the_end
from outboxio.support.log import log_of, type_name

logger = log_of(__name__)

OuterLifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]


class Runs(Protocol):
    """The outbox, for a lifespan."""

    def running(self) -> AbstractAsyncContextManager[object]: ...

    async def close(self) -> None: ...


class Lifespan:
    """``FastAPI(lifespan=outbox.lifespan)``, or ``Starlette(...)``: ``running()`` from the start of the application to
    its end.

    The lifespan sets ``app.state.outbox``. At the end the lifespan also closes the outbox, unless the outbox was in
    use before the application started. The lifespan does not migrate: call ``await outbox.migrate()`` at a
    deployment, or in a lifespan of your own.
    """

    def __init__(self, outbox: Runs, guard: EventLoopGuard, outer: OuterLifespan | None = None) -> None:
        self._outbox = outbox
        self._guard = guard
        self._outer = outer

    def within(self, outer: OuterLifespan) -> Lifespan:
        """The outbox runs inside a lifespan of the application, of which the state is passed on.

        ``outer`` is entered first and left last. So handlers have the objects that ``outer`` opens, until the last
        handler has ended.

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
        """The context of an application: yields the state of the outer lifespan, or ``None``.

        Entering and leaving raise the errors of ``running()``. An error of outboxio at the start is logged in one line,
        and raised without the tracebacks of the driver, which a framework would print.
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
                        await to_the_end(self._outbox.close())
        except OutboxError as error:
            if has_started:
                raise
            # The framework prints the traceback of the error, a hundred lines with those of SQLAlchemy and the driver.
            logger.critical("the application cannot start: %s", str(error), error_type=type_name(error))
            logger.debug("the application cannot start", exc_info=error)
            raise error.with_traceback(None) from None
