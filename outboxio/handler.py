"""Handlers: what reacts to events. A handler's name is schema, for it is stored with every notification."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, Unpack, cast, get_args, get_origin

from msgspec import Struct

from outboxio.backoff import Backoff, RetryPolicy
from outboxio.batch import Batch
from outboxio.errors import InvalidEvent, RegistrationError
from outboxio.event import Event, EventTypes, checked_name, is_strict, type_name, type_names, with_subclasses
from outboxio.options import (
    MISPLACED,
    NEVER_A_USERS_OWN,
    Delivery,
    HandlerKeywords,
    HandlerOptions,
    OnDeadKey,
    checked_options,
    is_async,
)
from outboxio.subscription import Subscription

if TYPE_CHECKING:
    from outboxio.envelope import EventEnvelope

E = TypeVar("E", bound=Event)

HandlerFunction = Callable[["EventEnvelope[Any]"], Awaitable[None]]
BatchFunction = Callable[[list["EventEnvelope[Any]"]], Awaitable[Any]]
AnyHandlerFunction = HandlerFunction | BatchFunction


class Handler(Struct, frozen=True, kw_only=True):
    """One registered handler."""

    name: str
    aliases: frozenset[str]
    event_types: tuple[type[Event], ...]
    topic: str | None
    options: HandlerOptions
    function: AnyHandlerFunction
    where: str

    @property
    def names(self) -> frozenset[str]:
        """Every name under which rows of this handler may be stored."""
        return self.aliases | {self.name}

    def accepts(self) -> Iterator[type[Event]]:
        """The event classes that it is for, subclasses included."""
        for cls in self.event_types:
            yield from with_subclasses(cls)


class EventHandler(Generic[E]):
    """The class form of a handler: options as class attributes, dependencies through the constructor.

    ``name`` is required and is stored with every notification: treat it as part of your schema, and rename it through
    ``aliases``. Event types are read from the type parameter unless ``event_types`` names them. The other attributes
    are those of ``@outbox.handler``.

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
    event_types: ClassVar[Iterable[type[Event]]] = ()
    topic: ClassVar[str | None] = None
    retry: ClassVar[RetryPolicy | Backoff | None] = None
    timeout: ClassVar[timedelta | float | str | None] = None
    concurrency: ClassVar[int | None] = None
    delivery: ClassVar[Delivery | str] = Delivery.AT_LEAST_ONCE
    on_dead: ClassVar[Any] = None
    ordered: ClassVar[bool] = False
    on_dead_key: ClassVar[OnDeadKey | str | None] = None
    batch: ClassVar[Batch | None] = None
    priority: ClassVar[int] = 0
    relay: ClassVar[bool] = False

    async def handle(self, envelope: Any, /) -> Any:
        """React to one event, or with ``batch`` to a list of them. Raising makes it run again, by the retry policy."""
        raise TypeError(f"{type(self).__name__} has no handle method: write `async def handle(self, envelope)`")


class HandlerRegistry:
    """The handlers of one outbox, by the names under which their rows are stored."""

    def __init__(self, types: EventTypes) -> None:
        self._types = types
        self._by_name: dict[str, Handler] = {}
        self._handlers: list[Handler] = []

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)

    def add(self, handler: Handler) -> None:
        """Take a handler in, whole or not at all; :class:`RegistrationError` says what clashes."""
        for name in sorted(handler.names):
            other = self._by_name.get(name)
            if other is not None:
                what = "name" if name == handler.name else "alias"
                raise RegistrationError(
                    f"handler {what} {name!r} is registered twice: by {other.where} (handler {other.name!r}) and "
                    f"{handler.where}; names and aliases are stored in event_notifications and must be unique"
                )
        for cls in handler.event_types:
            self._types.register(cls)
        self._by_name.update(dict.fromkeys(handler.names, handler))
        self._handlers.append(handler)

    def find(self, name: str) -> Handler | None:
        """The handler with this name or alias."""
        return self._by_name.get(name)

    @property
    def names(self) -> list[str]:
        """Every name and alias."""
        return sorted(self._by_name)

    def subscriptions(self) -> list[Subscription]:
        """What all handlers want, one entry for each event type name or topic."""
        return [wanted for handler in self._handlers for wanted in self.wanted_by(handler)]

    def wanted_by(self, handler: Handler) -> list[Subscription]:
        """What one handler wants."""
        return _wanted_by(handler)

    def strict_types(self) -> frozenset[str]:
        """The names of all event types whose handlers' priority is strict."""
        classes = {cls for handler in self._handlers for cls in handler.accepts()}.union(self._types)
        return frozenset(name for cls in classes if is_strict(cls) for name in type_names(cls))

    def event_class(self, handler: Handler, name: str) -> type[Event] | None:
        """The class that a stored event type stands for: a registered one, else the one below the handler's types."""
        found = self._types.find(name)
        if found is not None:
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
    event_types: Iterable[type[Event]],
    aliases: Iterable[str],
    topic: str | None,
    where: str,
    **options: Unpack[HandlerKeywords],
) -> Handler:
    """A handler of checked parts; :class:`RegistrationError` names the part that is wrong."""
    if isinstance(aliases, str):
        raise RegistrationError(f"aliases of handler {name!r} is one string; give a set of names: {{{aliases!r}}}")
    try:
        checked_name(name, "handler name")
        others = frozenset(checked_name(alias, f"an alias of handler {name!r}") for alias in aliases)
        wanted_topic = None if topic is None else checked_name(topic, f"the topic of handler {name!r}")
    except InvalidEvent as error:
        raise RegistrationError(f"{error} ({where})") from None
    if name in others:
        raise RegistrationError(f"handler {name!r} has its own name as an alias ({where}); leave it out")
    types = tuple(event_types)
    for cls in types:
        if not (isinstance(cls, type) and issubclass(cls, Event)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise RegistrationError(f"handler {name!r} is for {cls!r}, which is no Event class ({where})")
    if not types and topic is None:
        raise RegistrationError(f"handler {name!r} names neither event types nor a topic ({where})")
    if not is_async(function):
        raise RegistrationError(f"handler {name!r} must be an async function, {where} is not")
    handler = Handler(
        name=name,
        aliases=others,
        event_types=types,
        topic=wanted_topic,
        options=checked_options(name, where, options),
        function=function,
        where=where,
    )
    _refuse_strict_batch(handler)
    return handler


def _refuse_strict_batch(handler: Handler) -> None:
    strict = next(filter(is_strict, handler.accepts()), None)
    if handler.options.batch is not None and strict is not None:
        raise RegistrationError(
            f"handler {handler.name!r} has batch= and is for {type_name(strict)}, which has strict_priority=True "
            f"({handler.where}): each row of such an event waits for others, so there is no batch of them; leave one "
            "of them out"
        )


def handler_from_object(handler: EventHandler[Any]) -> Handler:
    """The handler that an :class:`EventHandler` object describes."""
    cls = type(handler)
    where = f"{cls.__module__}.{cls.__qualname__}"
    if not isinstance(handler, EventHandler):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise RegistrationError(f"add_handler() takes an EventHandler object, not {handler!r}")
    if not hasattr(handler, "name"):
        raise RegistrationError(f'{where} has no name; write `name = "..."` in the class, it is stored with its rows')
    for attribute in NEVER_A_USERS_OWN & vars(cls).keys():
        raise RegistrationError(f"handler {handler.name!r} has {attribute}= ({where}): {MISPLACED[attribute]}")
    options: Any = {option: getattr(handler, option) for option in HandlerKeywords.__annotations__}
    # A function that is a class attribute would come bound to the handler. That is right for on_dead, a method.
    options["retry"] = vars(handler).get("retry", cls.retry)
    return make_handler(
        handler.handle,
        name=handler.name,
        event_types=tuple(handler.event_types) or (_type_parameters(cls) if handler.topic is None else ()),
        aliases=handler.aliases,
        topic=handler.topic,
        where=where,
        **options,
    )


def where_defined(function: Callable[..., Any]) -> str:
    """How an error names a function: module and qualified name."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def _wanted_by(handler: Handler) -> list[Subscription]:
    def wanted(*, event_type: str = "", topic: str = "") -> Subscription:
        return Subscription(
            handler_name=handler.name,
            event_type=event_type,
            topic=topic,
            aliases=tuple(sorted(handler.aliases)),
            priority=handler.options.priority,
            ordered=handler.options.ordered,
        )

    if handler.topic is not None:
        return [wanted(topic=handler.topic)]
    names = {name for cls in handler.accepts() for name in type_names(cls)} - {type_name(Event)}
    return [wanted(event_type=name) for name in sorted(names)]


def _type_parameters(cls: type) -> tuple[type[Event], ...]:
    """The event classes in ``EventHandler[A]`` or ``EventHandler[A | B]`` among the bases."""
    parameter = _parameter_of(cls, {})
    return tuple(cast("type[Event]", m) for m in get_args(parameter) or (parameter,) if isinstance(m, type))


def _parameter_of(cls: type, known: Mapping[Any, Any]) -> Any:
    """What ``cls`` makes of EventHandler's type parameter, through generic classes in between; None if it does not."""
    for base in vars(cls).get("__orig_bases__", cls.__bases__):
        origin: Any = get_origin(base) or base
        arguments = [known.get(argument, argument) for argument in get_args(base)]
        if origin is EventHandler:
            return arguments[0] if arguments else None
        if issubclass(origin, EventHandler):
            names: tuple[Any, ...] = getattr(cast(Any, origin), "__parameters__", ())
            found = _parameter_of(cast(Any, origin), dict(zip(names, arguments, strict=False)))
            if found is not None:
                return found
    return None
