"""Registration of handlers and event classes, and the wiring of ``resources`` and ``around=`` into each run."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, TypeVar, Unpack, cast, overload

from msgspec.structs import replace

from outboxio.errors import ConfigurationError, RegistrationError
from outboxio.handlers.handler import (
    BatchFunction,
    EventHandler,
    Handler,
    HandlerFunction,
    HandlerRegistry,
    make_handler,
    refuse_unfit,
)
from outboxio.handlers.handler_object import handlers_from_object
from outboxio.handlers.options import Batch, HandlerKeywords, SingleKeywords
from outboxio.handlers.resources import Plan, Resources
from outboxio.model.envelope import EventEnvelope
from outboxio.model.event import EventTypes
from outboxio.model.payloads.classes import AnyEvent
from outboxio.support.signature import is_async, missing_for, where_defined
from outboxio.support.text import briefly

F = TypeVar("F", bound=HandlerFunction)
B = TypeVar("B", bound=BatchFunction)


class Registration(ABC):
    """The base class of :class:`~outboxio.Outbox` and :class:`Handlers`: registers handlers and event classes."""

    def __init__(self, wiring: Wiring | None = None) -> None:
        """``wiring`` binds handlers to resources; without it, an outbox binds them later."""
        self._types = EventTypes()
        self._handlers = HandlerRegistry(self._types)
        self._wiring = wiring
        self._is_included = False
        """True for :class:`Handlers` that were included in an outbox."""

    @overload
    def handler(
        self,
        *event_types: type[AnyEvent] | str,
        name: str,
        aliases: Iterable[str] = (),
        topic: str | None = None,
        batch: None = None,
        **options: Unpack[SingleKeywords],
    ) -> Callable[[F], F]: ...

    @overload
    def handler(
        self,
        *event_types: type[AnyEvent] | str,
        name: str,
        aliases: Iterable[str] = (),
        topic: str | None = None,
        batch: Batch,
        **options: Unpack[SingleKeywords],
    ) -> Callable[[B], B]: ...

    def handler(
        self,
        *event_types: type[AnyEvent] | str,
        name: str,
        aliases: Iterable[str] = (),
        topic: str | None = None,
        **options: Unpack[HandlerKeywords],
    ) -> Callable[[Any], Any]:
        """Register a function as the handler of events of these types, including subclasses.

        The function is async; a plain ``def`` runs in a thread. In addition to the envelope, it may take resources:
        parameters whose types are keys of ``Outbox(resources={type: value or factory})``.

        ``name`` is stored with every notification, so treat it as part of your schema. To rename a handler, keep the
        old name in ``aliases`` until no unfinished rows with that name are left. ``topic`` subscribes to all events
        that are emitted on that topic instead; event types then only determine how payloads are decoded. The options:

        ``retry`` is a :class:`RetryPolicy` or a callable of (attempts, exception). ``timeout`` (default: setting
        ``handler_timeout``) cancels a run that takes longer, which counts as a failure. ``concurrency`` limits the
        concurrent runs in each process (default: the setting of that name; 1 with ``batch``).

        ``delivery`` determines what happens after a crash. ``"at_least_once"``: the handler runs again, so it must be
        idempotent. ``"transactional"``: the handler works in ``envelope.tx``, a transaction on the event's shard that
        commits together with the delivery, so the effects in that database happen exactly once. ``"at_most_once"``: the
        handler never runs twice; if a run fails or is interrupted, the notification ends DEAD.

        ``on_dead`` is an async function of (envelope, error), called when a notification ends DEAD, or EXPIRED after a
        failure; before the hook of the outbox. The hook works in ``envelope.tx``, and its rows and events commit
        together with the final state. If the hook fails, the final state does not change, and only the hook is
        retried. Hooks have their own limit of concurrent runs, which equals ``concurrency``.

        ``since`` is the start date of a new handler: a datetime (naive UTC, or aware), or ``"now"`` for the time of the
        handler's first announcement, which does not change at later starts. Events with an earlier ``event_date`` end
        SKIPPED without a run. Without ``since``, a handler gets all events of its types that no handler has had yet.

        ``partitions``: processes share a handler by partitions. Each process handles the events of its own partitions,
        and no event runs in two processes; an ordered handler keeps the order within a key. ``"auto"`` (default): one
        process runs the handler until events have been waiting for ``settings.spread_after`` (10 s); then the handler
        is shared among the processes that have it, with four partitions each. Handlers with ``concurrency=1``, batch
        handlers without ``concurrency``, batch schedules, and strict priority stay in one process. A number from 1 to
        64 sets a fixed count; a larger number in code raises the count of the cluster once, and ``admin.partitions``
        sets it in both directions, or to ``"auto"``. On SQLite there is a single partition. ``total_concurrency``
        limits the concurrent runs in all processes together; it must be at least ``partitions``, because it is divided
        among the partitions.

        ``rate="100/s"`` (or a :class:`Rate`) limits how many runs start per unit of time, in all processes together.
        Retries count; a call of a batch handler is one run. With ``rate_per_key=True`` the rate applies to each
        ordering key of an ordered handler.

        ``alert_age`` (default: 60 s): the overview reports that the handler is behind when a notification has been due
        for that long.

        ``trace=False`` omits the runs of the handler from traces (``Outbox(telemetry=...)``). The events that it emits
        still continue the trace.

        ``raw=True`` disables decoding: ``envelope.event`` is the stored JSON of the event, as ``bytes``. Such a handler
        may specify event types by their stored names: ``@outbox.handler("InvoicePaid", name="mirror", raw=True)``.

        Raises :class:`RegistrationError` if the name is taken, too long, or blank; if the function cannot be called
        with one envelope (with ``batch``: a list) and the resources; if a plain function has
        ``delivery="transactional"``, or is a generator or a wrapper of an async function; if an annotation names other
        events than ``event_types``; or if a class is not an event class, has a field that cannot be stored, or lacks an
        upcaster between two others.

        Example::

            @outbox.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"}, timeout="10s")
            async def send_receipt(envelope: EventEnvelope[MoneyDeposited]) -> None: ...
        """

        def register(function: Any) -> Any:
            self._refuse_while_running()
            self._add(
                make_handler(
                    function,
                    name=name,
                    event_types=event_types,
                    aliases=aliases,
                    topic=topic,
                    where=where_defined(function),
                    **options,
                )
            )
            return function

        return register

    def add_handler(self, handler: EventHandler[Any]) -> None:
        """Register an :class:`EventHandler` object. Raises :class:`RegistrationError` like :meth:`handler`."""
        self._refuse_while_running()
        self._add(*handlers_from_object(handler))

    def include(self, handlers: Handlers) -> None:
        """Register all handlers and event classes of a :class:`Handlers`.

        Nothing can be added to ``handlers`` afterwards, because it would have no effect.

        Raises :class:`RegistrationError` like :meth:`handler`; for a duplicate name, the message names both handlers.

        Example::

            outbox.include(receipts.handlers)
        """
        self._refuse_while_running()
        if not isinstance(handlers, Handlers):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise RegistrationError(f"include() takes Handlers(), not {briefly(handlers)}")
        self._add(*handlers._handlers)
        for cls in handlers._types:
            self._types.register(cls)
        handlers._is_included = True

    def register(self, *event_types: type[AnyEvent]) -> None:
        """Register event classes that no handler names, so that payloads of a topic can be decoded.

        Raises :class:`AmbiguousTypeName` if another class has the same name, and :class:`RegistrationError` if the type
        of a field cannot be stored.
        """
        for cls in event_types:
            refuse_unfit(cls, "register()")
            self._types.register(cls)

    def _add(self, *handlers: Handler) -> None:
        bind = None if self._wiring is None else self._wiring.bind
        self._handlers.add(*(handlers if bind is None else map(bind, handlers)))

    @abstractmethod
    def _refuse_while_running(self) -> None:
        """Raise :class:`RegistrationError` if the handlers are running."""


class Handlers(Registration):
    """A router: handlers that are registered without an outbox, and included in one or more outboxes later.

    A module of handlers then need not import the outbox, and a test can include the handlers in its own outbox. The
    methods and options are those of :class:`~outboxio.Outbox`. A ``Handlers`` may include another ``Handlers``.

    Example::

        handlers = Handlers()

        @handlers.handler(MoneyDeposited, name="deposit-receipt")
        async def send_receipt(envelope: EventEnvelope[MoneyDeposited], mailer: Mailer) -> None: ...

        outbox = Outbox("postgresql://localhost/app", namespace="wallets", resources={Mailer: mailer})
        outbox.include(handlers)
    """

    def __init__(self) -> None:
        super().__init__()

    def _refuse_while_running(self) -> None:
        if self._is_included:
            raise RegistrationError(
                "these Handlers were already included, so a handler added now would never run: import the modules that "
                "register handlers before calling include()"
            )


Around = Callable[[EventEnvelope[Any]], AbstractAsyncContextManager[Any]]
"""A context manager around each run of a handler."""


class Wiring:
    """Binds handlers to the resources and the ``around`` of an outbox."""

    def __init__(self, resources: object = None, around: Around | None = None) -> None:
        self._resources = Resources(resources)
        self._around = _checked_around(around)

    def bind(self, handler: Handler) -> Handler:
        """Return the handler with its resources and ``around``, or unchanged if it needs neither.

        Raises :class:`RegistrationError` if the function cannot be called, or needs a resource that does not exist.
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
    """Calls a handler's function in the contexts of a run: first ``around``, then the resources.

    All contexts are exited before the outcome is determined, so an error on exit fails the run. No context can turn a
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
        assert raised is not None  # a context has suppressed the error
        raise raised


def _checked_around(around: object) -> Around | None:
    if around is None:
        return None
    subject = f"around of the outbox is {briefly(around)}"
    if not callable(around):
        raise ConfigurationError(f"{subject}; expected a function of the envelope, a context manager factory")
    if is_async(around) or inspect.isgeneratorfunction(around) or inspect.isasyncgenfunction(around):
        raise ConfigurationError(
            f"{subject}, which does not return an async context manager: write an async generator function, and "
            "decorate it with contextlib.asynccontextmanager"
        )
    missing = missing_for(around, 1, unwraps=True)
    if missing is not None:
        raise ConfigurationError(f"{subject}, which is called with one envelope and {missing}")
    return cast(Around, around)
