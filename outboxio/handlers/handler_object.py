"""Handler objects: from the attributes of an :class:`EventHandler` object to a handler."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isclass
from typing import Any, NoReturn, cast, get_args, get_origin

from msgspec.structs import replace

from outboxio.errors import RegistrationError
from outboxio.handlers.handler import EventHandler, Handler, each_of, make_handler
from outboxio.handlers.options import MISPLACED, NEVER_A_USERS_OWN, HandlerKeywords
from outboxio.model.payloads.classes import AnyEvent
from outboxio.support.text import is_respelt, meant_by


def handlers_from_object(handler: EventHandler[Any]) -> list[Handler]:
    """Return the handler that an :class:`EventHandler` object describes, and its companions."""
    made = handler_from_object(handler)
    return [made, *map(handler_from_object, handler.companions())]


def handler_from_object(handler: EventHandler[Any]) -> Handler:
    """Return the handler that an :class:`EventHandler` object describes."""
    cls = type(handler)
    where = f"{cls.__module__}.{cls.__qualname__}"
    if not isinstance(handler, EventHandler):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise RegistrationError(f"add_handler() takes an EventHandler object, not {handler!r}")
    if not hasattr(handler, "name"):
        raise RegistrationError(f'{where} has no name; write `name = "..."` in the class, it is stored with its rows')
    _refuse_misspelt(cls, handler.name, where)
    if getattr(handler.handle, "__func__", None) is vars(EventHandler)["handle"]:
        raise RegistrationError(f"handler {handler.name!r} ({where}) has no method `async def handle(self, envelope)`")
    types = each_of(handler.event_types, f"event_types of handler {handler.name!r}", where, "Event classes")
    options: Any = {option: getattr(handler, option) for option in HandlerKeywords.__annotations__}
    # A function that is a class attribute would be bound to the handler. That is right for on_dead, a method.
    options["retry"] = vars(handler).get("retry", cls.retry)
    made = make_handler(
        handler.handle,
        name=handler.name,
        event_types=types or (_type_parameters(cls) if handler.topic is None else ()),
        aliases=handler.aliases,
        topic=handler.topic,
        where=where,
        **options,
    )
    is_inherited = getattr(handler.close, "__func__", None) is vars(EventHandler)["close"]
    return made if is_inherited else replace(made, close=handler.close)


_OPTIONS = ("name", "aliases", "event_types", "topic", *HandlerKeywords.__annotations__)
_METHODS = ("handle", "on_dead", "retry")


def _refuse_misspelt(cls: type, name: str, where: str) -> None:
    """Refuse an attribute that is probably a misspelt option.

    A class may have any constants and methods. So a value is refused only if its name is similar to that of an option,
    and a method only if its name differs from that of a known method only in case. Names in capitals, and names that
    begin with an underscore, are always accepted.
    """
    for base in cls.__mro__[: cls.__mro__.index(EventHandler)]:
        for attribute, value in vars(base).items():
            if (
                attribute.startswith("_")
                or attribute.isupper()
                or attribute in _OPTIONS
                or attribute in ("handle", "close")
            ):
                continue
            if attribute in NEVER_A_USERS_OWN and issubclass(base, EventHandler):
                raise RegistrationError(f"handler {name!r} has {attribute}= ({where}): {MISPLACED[attribute]}")
            if isclass(value) or hasattr(value, "__get__"):
                meant = next((method for method in _METHODS if is_respelt(attribute, method)), None)
            else:
                meant = meant_by(attribute, _OPTIONS)
            if meant is not None:
                _refuse_attribute(name, attribute, meant, where)


def _refuse_attribute(name: str, attribute: str, meant: str, where: str) -> NoReturn:
    raise RegistrationError(
        f"handler {name!r} has the attribute {attribute!r} ({where}), which is not an option; did you mean {meant!r}? "
        f"An attribute of your own needs another name, such as '_{attribute}'"
    )


def _type_parameters(cls: type) -> tuple[type[AnyEvent], ...]:
    """Return the event classes in ``EventHandler[A]`` or ``EventHandler[A | B]`` among the bases."""
    parameter = _parameter_of(cls, {})
    parts = [member for member in get_args(parameter) or (parameter,) if isinstance(member, type)]
    return tuple(cast("type[AnyEvent]", member) for member in parts if member is not bytes)  # raw handlers take bytes


def _parameter_of(cls: type, known: Mapping[Any, Any]) -> Any:
    """Return ``cls``'s value for EventHandler's type parameter, through generic classes in between, or ``None``."""
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
