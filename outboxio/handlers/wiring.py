"""Wiring: what surrounds each run of a handler, ``resources`` by type and ``around=``, is put around its function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, cast

from msgspec.structs import replace

from outboxio.errors import ConfigurationError
from outboxio.handlers.handler import Handler
from outboxio.handlers.resources import Plan, Resources
from outboxio.model.envelope import EventEnvelope
from outboxio.support.signature import is_async, missing_for
from outboxio.support.text import briefly

Around = Callable[[EventEnvelope[Any]], AbstractAsyncContextManager[Any]]
"""A context manager around each run of a handler."""


class Wiring:
    """Binds handlers to the resources and the ``around`` of an outbox."""

    def __init__(self, resources: object = None, around: Around | None = None) -> None:
        self._resources = Resources(resources)
        self._around = _checked_around(around)

    def bind(self, handler: Handler) -> Handler:
        """The handler with everything that surrounds its runs. A handler that needs nothing stays as it is.

        Raises :class:`RegistrationError` if the function cannot be called, or needs a resource that is not there.
        """
        is_batch = handler.options.batch is not None
        called_with = "a list of envelopes" if is_batch else "one envelope"
        plan = self._resources.plan(handler.given, handler.name, called_with)
        if plan.steps or self._around is not None:
            return replace(handler, function=_Surrounded(handler.function, plan, self._around, is_batch=is_batch))
        if plan.arguments:
            values = {name: plan.values[key] for name, key in plan.arguments.items()}
            return replace(handler, function=partial(handler.function, **values))
        return handler


class _Surrounded:
    """A handler's function in the contexts of a run: first ``around``, then the resources.

    All contexts are left before the run is judged, so an error of closing fails the run. No context can turn a
    failure into a success.
    """

    def __init__(
        self, function: Callable[..., Awaitable[Any]], plan: Plan, around: Around | None, *, is_batch: bool
    ) -> None:
        self._function = function
        self._plan = plan
        self._around = around
        self._is_batch = is_batch

    async def __call__(self, argument: Any) -> Any:
        envelope = argument[0] if self._is_batch else argument
        raised: BaseException | None = None
        async with AsyncExitStack() as stack:
            try:
                if self._around is not None:
                    await stack.enter_async_context(self._around(envelope))
                return await self._function(argument, **await self._plan.open(stack, envelope))
            except BaseException as error:
                raised = error
                raise
        assert raised is not None  # a context has swallowed the error
        raise raised


def _checked_around(around: object) -> Around | None:
    if around is None:
        return None
    subject = f"around of the outbox is {briefly(around)}"
    if not callable(around):
        raise ConfigurationError(f"{subject}; expected a function of the envelope, a context manager factory")
    if is_async(around) or inspect.isgeneratorfunction(around) or inspect.isasyncgenfunction(around):
        raise ConfigurationError(
            f"{subject}, which returns no async context manager: write an async generator function, and decorate it "
            "with contextlib.asynccontextmanager"
        )
    missing = missing_for(around, 1, unwraps=True)
    if missing is not None:
        raise ConfigurationError(f"{subject}, which is called with one envelope and {missing}")
    return cast(Around, around)
