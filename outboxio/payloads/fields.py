"""Checking event classes at registration: a class with a field that JSON cannot hold is refused.

msgspec encodes some values that msgspec cannot decode, an enum of mixed values for example.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from outboxio.payloads.init_vars import stored_class, unfit_init_var
from outboxio.payloads.models import is_model, unfit_model

_NEVER_KEYS = (
    inspect.TupleType, inspect.VarTupleType, inspect.ListType, inspect.SetType, inspect.FrozenSetType,
    inspect.DictType, inspect.StructType, inspect.DataclassType, inspect.NamedTupleType, inspect.TypedDictType,
    inspect.NoneType, inspect.BoolType,
)  # fmt: skip
_MADE_BY_JSON = (dict, list, str, int, float)


def field_names(cls: Any) -> list[str]:
    """The names of the stored fields of an event class, in their order."""
    if dataclasses.is_dataclass(cls):  # also of Pydantic
        return [field.name for field in dataclasses.fields(cls)]
    for mark in ("__struct_fields__", "__pydantic_fields__"):
        if hasattr(cls, mark):
            return list(getattr(cls, mark))
    return [attribute.name for attribute in cls.__attrs_attrs__]


def unfit_field(cls: type) -> str | None:
    """The reason why no event of this class can be stored and read, or ``None``. The reason names the field.

    A class with annotations of names that are not defined yet is not judged.
    """
    reason = unfit_init_var(cls, needs_value=is_model(cls))
    if reason is not None or is_model(cls):
        return reason or unfit_model(cls)
    try:
        for name, annotation in _types_of(cls):
            try:
                info = inspect.type_info(annotation)
            except (TypeError, ValueError) as error:  # msgspec names the type, and not the field
                return f"field {name!r}: {error}"
            for path, reason in _unfit(info, name, set()):
                return f"field {path!r} {reason}"
        msgspec.json.Decoder(stored_class(cls))
    except NameError:
        return None
    except (TypeError, ValueError) as error:
        return str(error)
    return _hidden_field(cls)


def _types_of(cls: Any) -> list[tuple[str, Any]]:
    """The names and types of the fields."""
    if issubclass(cls, msgspec.Struct):
        return [(field.name, field.type) for field in msgspec.structs.fields(cls)]
    hints = typing.get_type_hints(cls, include_extras=True)
    attributes: Any = getattr(cls, "__attrs_attrs__", None)
    if attributes is None:
        return [(field.name, hints[field.name]) for field in dataclasses.fields(cls)]  # without ClassVar and InitVar
    return [(attribute.name, hints.get(attribute.name, Any)) for attribute in attributes]


def _hidden_field(cls: type) -> str | None:
    """msgspec leaves private attributes of attrs classes out."""
    for attribute in getattr(cls, "__attrs_attrs__", ()):
        if attribute.name.startswith("_"):
            return f"field {attribute.name!r} is private, and would not be stored; name it without the underscore"
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
