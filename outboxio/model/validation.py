"""Checking event classes at registration, and events before writing.

A class with a field that JSON cannot hold is refused before an event of that class exists. msgspec encodes some values
that msgspec cannot decode, an enum of mixed values for example.

The check decodes the JSON with the decoder that handlers get: an ``int`` becomes a ``float``, the text of a UUID a
UUID, a list a set. So an event is refused exactly if no handler could read the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from outboxio.errors import InvalidEvent
from outboxio.model.event import Event

E = TypeVar("E", bound=Event)

_NEVER_KEYS = (
    inspect.TupleType, inspect.VarTupleType, inspect.ListType, inspect.SetType, inspect.FrozenSetType,
    inspect.DictType, inspect.StructType, inspect.DataclassType, inspect.NamedTupleType, inspect.TypedDictType,
    inspect.NoneType, inspect.BoolType,
)  # fmt: skip
_MADE_BY_JSON = (dict, list, str, int, float)


def decoder_of(cls: type[E]) -> Callable[[bytes | str], E]:
    """The decoder from JSON to an event of this class, for handlers and for the check."""
    return msgspec.json.Decoder(cls).decode


class EventCheck:
    """Keeps the decoders of event classes, and refuses classes that no handler could read."""

    def __init__(self) -> None:
        self.decoders: dict[type[Event], Callable[[bytes | str], Event]] = {}
        """The decoder of each class."""

    def learn(self, cls: type[Event], subject: str) -> Callable[[bytes | str], Event]:
        """The decoder of a new class; :class:`InvalidEvent` if no event of the class can be stored and read."""
        reason = unfit_field(cls)
        if reason is not None:
            raise InvalidEvent(subject, f"its {reason}")
        decode = self.decoders[cls] = _decoder(cls, subject)
        return decode


def unreadable(error: Exception, subject: str) -> InvalidEvent:
    """The error for an event that was encoded and cannot be decoded."""
    return InvalidEvent(subject, f"its fields are not of their types: {_told(error)}")


def _decoder(cls: type[Event], subject: str) -> Callable[[bytes | str], Event]:
    try:
        return decoder_of(cls)
    except NameError as error:
        raise InvalidEvent(
            subject, f"the type of a field cannot be found: {error}; import the type at run time, not for type "
            "checkers only, or no handler can read the event"
        ) from error  # fmt: skip


def _told(error: Exception) -> Any:
    """The message of msgspec, with the Python word for ``null``."""
    text = str(error) or type(error).__name__
    return text.replace("`null`", "`None`") if isinstance(error, msgspec.ValidationError) else text


def unfit_field(cls: type[Event]) -> str | None:
    """The reason why no event of this class can be stored and read, or ``None``. The reason begins with the field.

    A class with annotations of names that are not defined yet is not judged.
    """
    try:
        fields = msgspec.structs.fields(cls)
    except NameError:
        return None
    for field in fields:
        try:
            info = inspect.type_info(field.type)
        except NameError:
            return None
        except (TypeError, ValueError) as error:  # msgspec names the type, and not the field
            return f"field {field.name!r}: {error}"
        for path, reason in _unfit(info, field.name, set()):
            return f"field {path!r} {reason}"
    return None


def _unfit(info: inspect.Type, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """The parts of a type that JSON cannot hold: path and reason of each."""
    if id(info) in seen:
        return  # a type that contains itself
    seen.add(id(info))
    if isinstance(info, inspect.CustomType) and not _comes_from_json(info.cls):
        yield path, f"is of type {_name(info.cls)}, which JSON cannot hold; {_remedy(info.cls)}"
    elif isinstance(info, inspect.ExtType):
        yield path, "is of type msgspec.msgpack.Ext, which JSON cannot hold; use bytes"
    if isinstance(getattr(info, "key_type", None), _NEVER_KEYS):
        yield path, "has keys that JSON cannot hold: a key must be text, a number, an id, a date or an enum"
    for part, its_path in _parts(info, path):
        yield from _unfit(part, its_path, seen)


def _parts(info: Any, path: str) -> Iterator[tuple[inspect.Type, str]]:
    """The types that a type is made of."""
    for field in getattr(info, "fields", ()):
        yield field.type, f"{path}.{field.name}"
    if hasattr(info, "key_type"):
        yield info.key_type, f"{path} key"
        yield info.value_type, f"{path}[...]"
    if hasattr(info, "item_type"):
        yield info.item_type, f"{path}[...]"
    for number, item in enumerate(getattr(info, "item_types", ())):
        yield item, f"{path}[{number}]"
    for member in getattr(info, "types", ()):
        yield member, path


def _comes_from_json(cls: Any) -> bool:
    """True if JSON values are instances of this class: ``object`` for example, or ``Iterable``."""
    try:
        return any(issubclass(made, cls) for made in _MADE_BY_JSON)
    except TypeError:  # a protocol that cannot be asked
        return False


def _remedy(cls: Any) -> str:
    if any(issubclass(cls, made) for made in (str, int, float)):
        return "use the built-in type, or typing.NewType"
    return "use a msgspec.Struct, a dataclass, an attrs class or a built-in type instead"


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
