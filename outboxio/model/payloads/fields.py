"""Dataclasses with ``InitVar`` fields. Such a field is a parameter of ``__init__`` that is not stored.

msgspec cannot decode such a class. So an event is decoded as a class with the same stored fields, and then copied.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import inspect

from outboxio.model.payloads.models import has_style, is_model, parts_of, unfit_model
from outboxio.support.codec import Check, refuse_leaf


def init_vars(cls: Any) -> dict[str, Any]:
    """Return the ``InitVar`` fields of a class by name; empty for a class that is not a dataclass."""
    fields: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
    # The kind of a pseudo-field has no public name. msgspec reads the same attribute.
    return {name: field for name, field in fields.items() if field._field_type.name == "_FIELD_INITVAR"}


def unfit_init_var(cls: Any, *, needs_value: bool) -> str | None:
    """Return why an event of a class with ``InitVar`` fields cannot be decoded, or ``None``.

    ``needs_value``: objects are created with ``__init__``, which requires a value for a field without a default.
    """
    for name, field in init_vars(cls).items():
        if hasattr(cls, "__post_init__"):
            reason = "but `__post_init__` needs it when an event is decoded"
        elif needs_value and field.default is dataclasses.MISSING:
            reason = "but the class cannot be instantiated without it"
        else:
            continue
        return f"field {name!r} is an InitVar, whose value is not stored, {reason}: make it a field, or remove it"
    return None


def stored_class(cls: Any) -> Any:
    """Return the class to decode an event as: ``cls``, or for a dataclass with ``InitVar`` fields one without them."""
    if not init_vars(cls):
        return cls
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [
        (one.name, hints[one.name], dataclasses.field(default=one.default, default_factory=one.default_factory))
        for one in dataclasses.fields(cls)
    ]
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)


def decoder_without_init_vars(cls: Any) -> Callable[[Any], Any]:
    """Return the decoder of a dataclass that may have ``InitVar`` fields."""
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


# --- numbers in JSON that a database would change -------------------------------------------------
#
# Numbers in JSON that a database would change: rejected, or written in a form that the database keeps.
#
# MariaDB and SQLite store the text of a document. PostgreSQL and MySQL store values:
#
# ============  ==========================================================  ==========================================
# Database      Number in JSON                                              Stored
# ============  ==========================================================  ==========================================
# PostgreSQL    float ``-0.0``                                              ``0.0``, so it is refused
# PostgreSQL    float from 1e16 on                                          an integer, unless written as ``1...0.0``
# MySQL         integer below -2^63 or above 2^64-1                         a double, so it is refused
# MySQL         decimal number of more than 15 digits                       a double, so it is refused if that differs
# ============  ==========================================================  ==========================================
#
# Each check scans the JSON text; a document is decoded only if the scan finds a suspicious number.


# A number follows a colon, a comma or a bracket: documents are written without spaces. The exponent of a float is
# written with a lowercase letter and without a plus, the exponent of a Decimal with an uppercase letter and a sign.
_CHANGED_BY_NUMERIC = re.compile(rb"[:,\[]-(?:0[.,}\]eE])|[:,\[]-?[0-9][0-9.]*(?:e[0-9]|E[+-])")
_STRING_OR_EXPONENT = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.]*[eE][+-]?[0-9]+')

_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_SIXTEEN_DIGITS = b"0" * 16
"""A double keeps all decimal numbers of up to 15 digits."""
_LONGEST_NUMERIC = 131_072  # digits before the point, on PostgreSQL
_FINEST_NUMERIC = 16_383  # digits after the point

_decode: Callable[[bytes], Any] = msgspec.json.Decoder(float_hook=Decimal).decode


def kept_by_numeric(document: bytes, subject: str) -> bytes:
    """Check a document for PostgreSQL, whose ``jsonb`` stores numbers as ``numeric``."""
    if _CHANGED_BY_NUMERIC.search(document) is None:
        return document
    decoded = _decode(document)
    refuse_leaf(decoded, subject, _is_negative_zero, "is -0.0, which PostgreSQL stores as 0.0; add 0.0 to the number")
    refuse_leaf(decoded, subject, _exceeds_numeric, "is {}, which has more digits than PostgreSQL stores; use a string")
    return _STRING_OR_EXPONENT.sub(_without_exponent, document)


def kept_by_double(document: bytes, subject: str) -> bytes:
    """Check a document for MySQL, whose JSON stores integers of 64 bits, and all other numbers as doubles."""
    if _SIXTEEN_DIGITS in document.translate(_AS_ZEROS, b".") or b"E+" in document or b"E-" in document:
        refuse_leaf(
            _decode(document), subject, _is_changed_by_double,
            "is {}, which MySQL would round: its JSON holds integers of 64 bits, and other numbers of about 15 "
            "digits; use a string",
        )  # fmt: skip
    return document


def needs_check(cls: Any, check: Check) -> bool:
    """True if a correctly typed object of an event class may hold a number that ``check`` finds."""
    if is_model(cls) or has_style(cls):
        return True
    return _may_hold(inspect.type_info(cls), inspect.FloatType if check is kept_by_numeric else inspect.IntType, set())


def _may_hold(info: Any, kind: type[inspect.Type], seen: set[int]) -> bool:
    if id(info) in seen:
        return False  # a type that contains itself
    seen.add(id(info))
    may_be_any = isinstance(info, inspect.AnyType | inspect.CustomType | inspect.RawType)
    return may_be_any or isinstance(info, kind) or any(_may_hold(part, kind, seen) for part in parts_of(info))


def _is_negative_zero(leaf: object) -> bool:
    return isinstance(leaf, Decimal) and leaf.is_zero() and leaf.is_signed()


def _exceeds_numeric(leaf: object) -> bool:
    if not isinstance(leaf, Decimal):
        return False
    exponent = leaf.as_tuple().exponent
    return leaf.adjusted() >= _LONGEST_NUMERIC or (isinstance(exponent, int) and exponent < -_FINEST_NUMERIC)


def _is_changed_by_double(leaf: object) -> bool:
    if isinstance(leaf, int):
        return not -(2**63) <= leaf < 2**64
    if isinstance(leaf, Decimal):
        stored = float(leaf)
        return not math.isfinite(stored) or Decimal(repr(stored)) != leaf
    return False


def _without_exponent(match: re.Match[bytes]) -> bytes:
    text = match[0]
    if text.startswith(b'"'):
        return text
    plain = f"{Decimal(text.decode()):f}".encode()
    return plain if b"." in plain else plain + b".0"


# --- checking event classes at registration -------------------------------------------------------
#
# Checking event classes at registration: a class with a field that JSON cannot hold is refused.
#
# msgspec encodes some values that msgspec cannot decode, an enum of mixed values for example.


_NEVER_KEYS = (
    inspect.TupleType, inspect.VarTupleType, inspect.ListType, inspect.SetType, inspect.FrozenSetType,
    inspect.DictType, inspect.StructType, inspect.DataclassType, inspect.NamedTupleType, inspect.TypedDictType,
    inspect.NoneType, inspect.BoolType,
)  # fmt: skip
_MADE_BY_JSON = (dict, list, str, int, float)


def field_names(cls: Any) -> list[str]:
    """Return the names of the stored fields of an event class, in order."""
    if dataclasses.is_dataclass(cls):  # also of Pydantic
        return [field.name for field in dataclasses.fields(cls)]
    for mark in ("__struct_fields__", "__pydantic_fields__"):
        if hasattr(cls, mark):
            return list(getattr(cls, mark))
    return [attribute.name for attribute in cls.__attrs_attrs__]


def unfit_field(cls: type) -> str | None:
    """Return why events of this class cannot be stored and read, or ``None``. The reason names the field.

    A class whose annotations cannot be resolved yet is not checked.
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
    """Return the names and types of the fields."""
    if issubclass(cls, msgspec.Struct):
        return [(field.name, field.type) for field in msgspec.structs.fields(cls)]
    hints = typing.get_type_hints(cls, include_extras=True)
    attributes: Any = getattr(cls, "__attrs_attrs__", None)
    if attributes is None:
        return [(field.name, hints[field.name]) for field in dataclasses.fields(cls)]  # without ClassVar and InitVar
    return [(attribute.name, hints.get(attribute.name, Any)) for attribute in attributes]


def _hidden_field(cls: type) -> str | None:
    """Return why a private attribute is refused: msgspec omits private attributes of attrs classes."""
    for attribute in getattr(cls, "__attrs_attrs__", ()):
        if attribute.name.startswith("_"):
            return f"field {attribute.name!r} is private, and would not be stored; name it without the underscore"
    return None


def _unfit(info: inspect.Type, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the path and reason of each part of a type that JSON cannot hold."""
    if id(info) in seen:
        return  # a type that contains itself
    seen.add(id(info))
    if isinstance(info, inspect.CustomType) and not _comes_from_json(info.cls):
        yield path, f"is of type {_name(info.cls)}, which JSON cannot hold; {_fix_for(info.cls)}"
    elif isinstance(info, inspect.ExtType):
        yield path, "is of type msgspec.msgpack.Ext, which JSON cannot hold; use bytes"
    if isinstance(getattr(info, "key_type", None), _NEVER_KEYS):
        yield path, "has keys that JSON cannot hold: a key must be text, a number, an id, a date or an enum"
    for part, its_path in _parts(info, path):
        yield from _unfit(part, its_path, seen)


def _parts(info: Any, path: str) -> Iterator[tuple[inspect.Type, str]]:
    """Yield the types inside a type."""
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
    except TypeError:  # a protocol without runtime checks
        return False


def _fix_for(cls: Any) -> str:
    if any(issubclass(cls, made) for made in (str, int, float)):
        return "use the built-in type, or typing.NewType"
    return "use a msgspec.Struct, a dataclass, an attrs class or a built-in type instead"


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
