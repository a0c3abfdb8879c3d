"""The part of an outbox that registers handlers and event classes.

Wiring: what surrounds each run of a handler, ``resources`` by type and ``around=``, is put around its function.
"""

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
        """``wiring`` binds handlers to resources; without it, the handlers are bound later, by an outbox."""
        self._types = EventTypes()
        self._handlers = HandlerRegistry(self._types)
        self._wiring = wiring
        self._is_included = False
        """True for :class:`Handlers` that an outbox has taken over."""

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
        """Register a function as the handler of events of these types, subclasses included.

        The function is async; a plain ``def`` runs in a thread of the handler. After the envelope, the function may
        take resources: parameters whose types are keys of ``Outbox(resources={type: value or factory})``.

        ``name`` is stored with every notification, so treat the name as part of your schema. To rename a handler, keep
        the old name in ``aliases`` until no unfinished rows with the old name are left. ``topic`` subscribes to every
        event that is emitted on that topic instead; event types then only say how payloads are decoded. The options
        are:

        ``retry`` is a :class:`RetryPolicy` or a callable of (attempts, exception). ``timeout`` (default: setting
        ``handler_timeout``) cancels a run that takes longer, which counts as a failure. ``concurrency`` limits the
        runs at the same time (default: the setting of that name; 1 with ``batch``).

        ``delivery`` decides about a crash half-way. ``"at_least_once"``: the handler runs again, so the handler must
        be idempotent. ``"transactional"``: the handler works in ``envelope.tx``, a transaction on the event's shard
        that commits together with the delivery, so the effects in that database happen exactly once.
        ``"at_most_once"``: the handler never runs a second time; a run that fails, or is cut short, ends DEAD.

        ``on_dead`` is an async function of (envelope, error), called when a notification ends DEAD, or EXPIRED after a
        failure; before the hook of the outbox. The hook works in ``envelope.tx``, and its rows and events commit
        together with that end. If the hook fails, the verdict stands and only the hook is tried again. As many hooks
        of one handler run at the same time as its ``concurrency`` says, beside its own runs.

        ``since`` keeps history from a new handler: a datetime (naive UTC, or aware), or ``"now"`` for the moment of the
        handler's first announcement, which stays the same at every later start. Older events, by their ``event_date``,
        end SKIPPED without a run. Without ``since``, a handler gets all events that waited for a first handler.

        ``partitions``: processes share the handler by partitions. Each process runs the events of its own partitions,
        and no event runs in two; an ordered handler keeps the order within a key. ``"auto"`` (default): one process
        runs the handler until events have been waiting for ``settings.spread_after`` (10 s); then outboxio shares the
        handler among the processes that have it, with four partitions for each. A handler with ``concurrency=1``, a
        batch handler without ``concurrency``, a batch schedule, and strict priority stay in one process. A number from
        1 to 64 fixes the number; a larger number in code raises the number of the cluster once, and
        ``admin.partitions`` sets the number in both directions, or to ``"auto"``. SQLite has
        a single partition. ``total_concurrency`` limits the runs at the same time in all processes together; it is at
        least ``partitions``, because each partition gets its share. ``concurrency`` is the limit of each process.

        ``rate="100/s"`` (or a :class:`Rate`) limits how many runs start in a time, in all processes together. Retries
        count; a call of a batch handler is one run. ``rate_per_key=True``: the rate is for each ordering key of an
        ordered handler.

        ``alert_age`` (default: 60 s): the overview says that the handler is behind as soon as a notification has been
        due for so long.

        ``trace=False`` leaves the runs of the handler out of traces (``Outbox(telemetry=...)``). The events that the
        handler emits continue the trace.

        ``raw=True`` decodes nothing: ``envelope.event`` is the stored JSON of the event, as ``bytes``. Such a handler
        may name event types by their stored names, as in ``@outbox.handler("InvoicePaid", name="mirror", raw=True)``.

        Raises :class:`RegistrationError` in these cases: the name is taken, too long, or blank; the function cannot be
        called with one envelope (with ``batch``: a list) and the resources; a plain function has
        ``delivery="transactional"``, or is a generator or a wrapper of an async function; an annotation names other
        events than ``event_types``; a class is no event class, has a field that cannot be stored, or
        lacks an upcaster between two others.

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

        From then on nothing can be added to ``handlers``, because this object would not notice.

        Raises :class:`RegistrationError` like :meth:`handler`; two handlers with the same name are both named.

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
        """Make event classes known that no handler names, so that a topic's payloads decode to these classes.

        Raises :class:`AmbiguousTypeName` if another class has the same name, :class:`RegistrationError` if a field is
        of a type that cannot be stored.
        """
        for cls in event_types:
            refuse_unfit(cls, "register()")
            self._types.register(cls)

    def _add(self, *handlers: Handler) -> None:
        bind = None if self._wiring is None else self._wiring.bind
        self._handlers.add(*(handlers if bind is None else map(bind, handlers)))

    @abstractmethod
    def _refuse_while_running(self) -> None:
        """Raise :class:`RegistrationError` if the handlers are at work."""


class Handlers(Registration):
    """A router: handlers that are registered apart from an outbox, and included in one or several outboxes later.

    So a module of handlers does not import the outbox, and a test includes the handlers in an outbox of its own. The
    methods and options are those of :class:`~outboxio.Outbox`. A ``Handlers`` may include a second ``Handlers``.

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
                "these Handlers were included already, and a later handler would never run: import the modules that "
                "register handlers before include()"
            )


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
