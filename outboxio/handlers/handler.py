"""Handlers, which react to events. The name of a handler is stored with every notification."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    TypeVar,
    Unpack,
    cast,
)

from msgspec import Struct

from outboxio.errors import InvalidEvent, RegistrationError
from outboxio.handlers.in_thread import InThread, flaw_of
from outboxio.handlers.options import (
    ALERT_AGE,
    AnyDelivery,
    AnyOnDeadKey,
    AnyPartitions,
    Batch,
    Delivery,
    HandlerKeywords,
    HandlerOptions,
    Since,
    Subscription,
    checked_options,
)
from outboxio.handlers.rate import Rate
from outboxio.handlers.resources import CallCheck
from outboxio.model.event import (
    Event,
    EventTypes,
    checked_name,
    is_event_class,
    is_strict,
    type_name,
    type_names,
    upcasters_of,
    version_of,
    with_subclasses,
)
from outboxio.model.payloads.classes import AnyEvent, missing_step
from outboxio.model.payloads.fields import unfit_field
from outboxio.model.retry import Backoff, RetryPolicy
from outboxio.support.signature import is_async

if TYPE_CHECKING:
    from outboxio.model.envelope import EventEnvelope

E = TypeVar("E", bound=AnyEvent | bytes)
T = TypeVar("T")

# The parameters after the first are resources by type.
HandlerFunction = Callable[Concatenate["EventEnvelope[Any]", ...], Awaitable[None] | None]
BatchFunction = Callable[Concatenate[list["EventEnvelope[Any]"], ...], Awaitable[Any] | Iterable[Any] | None]
AnyHandlerFunction = HandlerFunction | BatchFunction


class Handler(Struct, frozen=True, kw_only=True):
    """A registered handler."""

    name: str
    aliases: frozenset[str]
    event_types: tuple[type[AnyEvent], ...]
    type_names: tuple[str, ...]
    """Event types that a raw handler names by their stored names, without a class."""
    topic: str | None
    options: HandlerOptions
    given: Callable[..., Any]
    """The user's function."""
    function: Callable[..., Awaitable[Any]]
    """Calls the user's function: in a thread if it is a plain function, and with its resources and contexts."""
    thread: InThread | None
    where: str
    close: Callable[[], Any] | None = None
    """The method of a handler object that ``outbox.close()`` calls."""

    @property
    def names(self) -> frozenset[str]:
        """The names under which rows of this handler may be stored: the name and the aliases."""
        return self.aliases | {self.name}

    @property
    def event_type_names(self) -> list[str]:
        """The names of the event types as specified, without subclasses."""
        return sorted({*map(type_name, self.event_types), *self.type_names})

    def accepts(self) -> Iterator[type[AnyEvent]]:
        """Return the event classes of the handler, subclasses included."""
        for cls in self.event_types:
            yield from with_subclasses(cls)


class EventHandler(Generic[E]):
    """The class form of a handler: options as class attributes, dependencies through the constructor.

    ``name`` is required and stored with every notification: treat it as part of your schema, and rename a handler with
    ``aliases``. Event types are read from ``event_types``, or else from the type parameter. The other attributes are
    the options of ``@outbox.handler``. A raw handler is an ``EventHandler[bytes]``, and names event types by class or
    by stored name.

    Example::

        class SendReceipt(EventHandler[MoneyDeposited]):
            name = "deposit-receipt"
            retry = RetryPolicy(max_attempts=5)

            def __init__(self, mailer: Mailer) -> None:
                self.mailer = mailer

            async def handle(self, envelope: EventEnvelope[MoneyDeposited]) -> None:
                await self.mailer.send(envelope.event.wallet_id)

        outbox.add_handler(SendReceipt(mailer))
    """

    name: ClassVar[str]
    aliases: ClassVar[Iterable[str]] = ()
    event_types: ClassVar[Iterable[type[AnyEvent] | str]] = ()
    topic: ClassVar[str | None] = None
    retry: ClassVar[RetryPolicy | Backoff | None] = None
    timeout: ClassVar[timedelta | float | str | None] = None
    concurrency: ClassVar[int | None] = None
    delivery: ClassVar[AnyDelivery] = Delivery.AT_LEAST_ONCE
    on_dead: ClassVar[Any] = None
    ordered: ClassVar[bool] = False
    on_dead_key: ClassVar[AnyOnDeadKey | None] = None
    batch: ClassVar[Batch | None] = None
    priority: ClassVar[int] = 0
    relay: ClassVar[bool] = False
    since: ClassVar[Since | None] = None
    partitions: ClassVar[AnyPartitions] = "auto"
    total_concurrency: ClassVar[int | None] = None
    rate: ClassVar[Rate | str | None] = None
    rate_per_key: ClassVar[bool] = False
    alert_age: ClassVar[timedelta | float | str] = ALERT_AGE
    trace: ClassVar[bool] = True
    raw: ClassVar[bool] = False

    def handle(self, *args: Any, **kwargs: Any) -> Any:
        """Handle an event. If it raises, the retry policy applies.

        Write ``async def handle(self, envelope: EventEnvelope[...])``; a plain ``def`` runs in a thread. With ``batch``
        the argument is a list of envelopes. Further parameters are resources by type.
        """
        raise TypeError(f"{type(self).__name__} has no handle method: write `async def handle(self, envelope)`")

    def companions(self) -> Iterable[EventHandler[Any]]:
        """Return further handlers that ``add_handler`` registers together with this one. By default there are none."""
        return ()

    async def close(self) -> None:
        """Close resources that the handler has opened, such as a broker client.

        Each ``outbox.close()`` awaits it once, after all runs have ended, for at most ``shutdown_timeout``, and raises
        its error after all handlers and connections are closed. An outbox may be used again after ``close()``,
        so a handler should open its client in the first run that needs it.
        """


class HandlerRegistry:
    """The handlers of an outbox, by the names under which rows are stored."""

    def __init__(self, types: EventTypes) -> None:
        self._types = types
        self._by_name: dict[str, Handler] = {}
        self._handlers: list[Handler] = []
        self._only: frozenset[str] | None = None

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)

    def add(self, *handlers: Handler) -> None:
        """Add handlers. Raises :class:`RegistrationError`, and adds none, if a name or an event type conflicts."""
        for handler in handlers:
            self._refuse_taken(handler)
        for cls in (cls for handler in handlers for cls in handler.event_types):
            self._types.register(cls)
        for handler in handlers:
            self._types.add_stored_names(handler.type_names)
            self._by_name.update(dict.fromkeys(handler.names, handler))
        self._handlers += handlers

    def _refuse_taken(self, handler: Handler) -> None:
        for name in sorted(handler.names):
            other = self._by_name.get(name)
            if other is not None:
                what = "name" if name == handler.name else "alias"
                raise RegistrationError(
                    f"handler {what} {name!r} is registered twice: by {other.where} (handler {other.name!r}) and "
                    f"{handler.where}; names and aliases are stored in event_notifications and must be unique"
                )

    def find(self, name: str) -> Handler | None:
        """Return the handler with this name or alias."""
        return self._by_name.get(name)

    def name_of(self, stored: str) -> str:
        """Return the name of the handler for a stored name, which may be an alias; unknown names are unchanged."""
        handler = self.find(stored)
        return stored if handler is None else handler.name

    @property
    def names(self) -> list[str]:
        """All names and aliases."""
        return sorted(self._by_name)

    def run_only(self, names: Iterable[str]) -> None:
        """Run only these handlers in this process. All are still announced, so that they get their events."""
        self._only = frozenset(self.name_of(name) for name in names)

    @property
    def to_run(self) -> list[Handler]:
        """The handlers that this process runs."""
        return [handler for handler in self._handlers if self._only is None or handler.name in self._only]

    @property
    def names_to_run(self) -> list[str]:
        """The names and aliases of the handlers that this process runs."""
        return sorted(name for handler in self.to_run for name in handler.names)

    def subscriptions(self) -> list[Subscription]:
        """Return the subscriptions of all handlers: for each handler, an entry per event type name or topic."""
        return [subscription for handler in self._handlers for subscription in self.subscriptions_of(handler)]

    def subscriptions_of(self, handler: Handler) -> list[Subscription]:
        """Return the subscriptions of a handler."""
        return subscriptions_of(handler)

    def strict_types(self) -> frozenset[str]:
        """Return the names of all event types with strict priority."""
        classes = {cls for handler in self._handlers for cls in handler.accepts()}.union(self._types)
        return frozenset(name for cls in classes if is_strict(cls) for name in type_names(cls))

    def event_class(self, handler: Handler, name: str) -> type[AnyEvent] | None:
        """Return the class of a stored event type: a registered class, or else a subclass of the handler's types."""
        found = self._types.find(name)
        if found is not None or not handler.event_types:
            return found
        candidates = {cls for cls in handler.accepts() if name in type_names(cls)}
        if len(candidates) > 1:
            first, second, *_ = sorted(candidates, key=lambda cls: (cls.__module__, cls.__qualname__))
            raise InvalidEvent(f"event type {name!r}", f"both {first} and {second} have this name; give one type_name=")
        return candidates.pop() if candidates else None


def make_handler(
    function: AnyHandlerFunction,
    *,
    name: str,
    event_types: Iterable[type[AnyEvent] | str],
    aliases: Iterable[str],
    topic: str | None,
    where: str,
    **options: Unpack[HandlerKeywords],
) -> Handler:
    """Create a handler from validated parts. Raises :class:`RegistrationError`, which names the invalid part."""
    others, checked_topic = _checked_names(name, aliases, topic, where)
    is_raw = options.get("raw", False) is True
    types, names = _checked_types(event_types, name, where, is_raw=is_raw)
    if not types and not names and topic is None:
        raise RegistrationError(f"handler {name!r} names neither event types nor a topic ({where})")
    is_plain = not is_async(function)
    if is_plain and (flaw := flaw_of(function)) is not None:
        raise RegistrationError(f"handler {name!r} must be a function, async or plain: {where} {flaw}")
    thread = InThread(function, name) if is_plain else None
    handler = Handler(
        name=name,
        aliases=others,
        event_types=types,
        type_names=names,
        topic=checked_topic,
        options=checked_options(name, where, options),
        given=function,
        function=thread or cast("Callable[..., Awaitable[Any]]", function),
        thread=thread,
        where=where,
    )
    if is_plain and handler.options.delivery is Delivery.TRANSACTIONAL:
        raise RegistrationError(
            f"handler {name!r} has delivery='transactional' and is a plain function ({where}): it runs in a thread, "
            "and a transaction can only be used in its event loop; write it as `async def`, or remove delivery="
        )
    _refuse_strict_batch(handler)
    is_batch = handler.options.batch is not None
    check = CallCheck(function=function, name=name, where=where, event_types=types, is_batch=is_batch, is_raw=is_raw)
    check.refuse()
    return handler


def _checked_names(
    name: str, aliases: Iterable[str], topic: str | None, where: str
) -> tuple[frozenset[str], str | None]:
    """Return the aliases and the topic. Raises :class:`RegistrationError` if a name or the topic cannot be stored."""
    if isinstance(aliases, str):
        raise RegistrationError(f"aliases of handler {name!r} is one string; pass a set of names: {{{aliases!r}}}")
    try:
        checked_name(name, "handler name")
        listed = each_of(aliases, f"aliases of handler {name!r}", where, "names")
        others = frozenset(checked_name(alias, f"an alias of handler {name!r}") for alias in listed)
        checked_topic = None if topic is None else checked_name(topic, f"the topic of handler {name!r}")
    except InvalidEvent as error:
        raise RegistrationError(f"{error} ({where})") from None
    if name in others:
        raise RegistrationError(f"handler {name!r} has its own name as an alias ({where}); remove it")
    return others, checked_topic


def _checked_types(
    event_types: Iterable[type[AnyEvent] | str], name: str, where: str, *, is_raw: bool
) -> tuple[tuple[type[AnyEvent], ...], tuple[str, ...]]:
    """Return the event classes, and the names of event types without a class, which only a raw handler may have.

    Raises :class:`RegistrationError` for anything but an event class or a name that can be stored.
    """
    subject = f"event_types of handler {name!r}"
    if isinstance(event_types, str):
        raise RegistrationError(f"{subject} is one string ({where}); pass a tuple: ({event_types!r},)")
    types, names = list[type[AnyEvent]](), list[str]()
    for each in each_of(event_types, subject, where, "Event classes"):
        if isinstance(each, str):
            names.append(_checked_type_name(each, name, where, is_raw=is_raw))
            continue
        if not is_event_class(each):
            raise RegistrationError(f"handler {name!r} is for {each!r}, which is not an Event class ({where})")
        refuse_unfit(each, f"handler {name!r} ({where})")
        types.append(each)
    return tuple(types), tuple(names)


def _checked_type_name(type_name: str, name: str, where: str, *, is_raw: bool) -> str:
    if not is_raw:
        raise RegistrationError(
            f"handler {name!r} is for {type_name!r}, a name ({where}), but decoding an event requires its class: pass "
            "the Event class, or add raw=True to disable decoding"
        )
    try:
        return checked_name(type_name, f"an event type of handler {name!r}")
    except InvalidEvent as error:
        raise RegistrationError(f"{error} ({where})") from None


def each_of(values: Iterable[T], subject: str, where: str, what: str) -> tuple[T, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise RegistrationError(f"{subject} is {values!r} ({where}); expected a tuple or a set of {what}") from None


def refuse_unfit(cls: type[AnyEvent], subject: str) -> None:
    """Raise :class:`RegistrationError` if events of a class cannot be stored and read."""
    reason = unfit_field(cls)
    if reason is not None:
        raise RegistrationError(f"{subject} is for events that cannot be stored and read: {type_name(cls)}, {reason}")
    missing = missing_step(version_of(cls), upcasters_of(cls))
    if missing is not None:
        raise RegistrationError(
            f"{subject} is for {type_name(cls)} of version {version_of(cls)}, but there is no upcaster from version "
            f"{missing}: add @outboxio.upcaster(..., from_version={missing}) before the handler"
        )


def _refuse_strict_batch(handler: Handler) -> None:
    strict = next(filter(is_strict, handler.accepts()), None)
    if handler.options.batch is not None and strict is not None:
        raise RegistrationError(
            f"handler {handler.name!r} has batch= and is for {type_name(strict)}, which has strict_priority=True "
            f"({handler.where}): each row of such an event waits for others, so they cannot be batched; remove one of "
            "the options"
        )


def subscriptions_of(handler: Handler) -> list[Subscription]:
    """Return the subscriptions of a handler: an entry per event type name, or one for its topic."""

    def subscription(*, event_type: str = "", topic: str = "") -> Subscription:
        return Subscription(
            handler_name=handler.name,
            event_type=event_type,
            topic=topic,
            aliases=tuple(sorted(handler.aliases)),
            priority=handler.options.priority,
            ordered=handler.options.ordered,
        )

    if handler.topic is not None:
        return [subscription(topic=handler.topic)]
    names = {name for cls in handler.accepts() for name in type_names(cls)} - {type_name(Event)}
    names.update(handler.type_names)
    return [subscription(event_type=name) for name in sorted(names)]
