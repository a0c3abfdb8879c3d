"""Dataclasses with ``InitVar`` fields. Such a field is a parameter of ``__init__`` that is not stored.

msgspec decodes no such class, so an event is decoded as a class of the same stored fields, and copied from there.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import msgspec


def init_vars(cls: Any) -> dict[str, Any]:
    """The ``InitVar`` fields of a class by name; empty for a class that is not a dataclass."""
    fields: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
    # The kind of a pseudo-field has no public name. msgspec reads the same attribute.
    return {name: field for name, field in fields.items() if field._field_type.name == "_FIELD_INITVAR"}


def unfit_init_var(cls: Any, *, needs_value: bool) -> str | None:
    """The reason why an event of a class with ``InitVar`` fields cannot be read, or ``None``.

    ``needs_value``: the class is made through its ``__init__``, which requires a field without a default.
    """
    for name, field in init_vars(cls).items():
        if hasattr(cls, "__post_init__"):
            told = "and `__post_init__` would need it when an event is read"
        elif needs_value and field.default is dataclasses.MISSING:
            told = "and the class cannot be made without it"
        else:
            continue
        return f"field {name!r} is an InitVar, whose value is not stored, {told}: make it a field, or leave it out"
    return None


def stored_class(cls: Any) -> Any:
    """The class to decode an event as: ``cls``, or for a dataclass with ``InitVar`` fields a class without them."""
    if not init_vars(cls):
        return cls
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [
        (one.name, hints[one.name], dataclasses.field(default=one.default, default_factory=one.default_factory))
        for one in dataclasses.fields(cls)
    ]
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)


def decoder_without_init_vars(cls: Any) -> Callable[[Any], Any]:
    """The decoder of a dataclass that may have ``InitVar`` fields."""
    stored = stored_class(cls)
    decode = msgspec.json.Decoder(stored).decode
    if stored is cls:
        return decode
    names = [field.name for field in dataclasses.fields(cls)]

    def decode_and_copy(payload: Any) -> Any:
        decoded, event = decode(payload), object.__new__(cls)
        for name in names:
            object.__setattr__(event, name, getattr(decoded, name))  # the class may be frozen
        return event

    return decode_and_copy
