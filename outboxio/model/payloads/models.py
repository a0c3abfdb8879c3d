"""Pydantic models and Pydantic dataclasses: encoded and decoded by Pydantic, in its JSON mode.

A model is stored under its aliases and without its computed fields, so that the stored object is an input of the same
model. Pydantic is not imported until your application defines an event class with it.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from typing import Any, cast

import msgspec
from msgspec import inspect

from outboxio.errors import InvalidEvent
from outboxio.support.codec import Check, encode_object, not_finite_in

_NOT_IN_JSON = ("is-instance", "is-subclass", "callable")
_CHILDREN = (
    "schema", "lax_schema", "json_schema", "items_schema", "keys_schema", "values_schema", "extras_schema", "fields",
    "choices", "definitions",
)  # fmt: skip


def is_model(cls: Any) -> bool:
    """True for a class that Pydantic validates: a ``BaseModel`` or a Pydantic dataclass."""
    return hasattr(cls, "__pydantic_validator__")


class ModelCodec:
    """Encodes and decodes the objects of a Pydantic class."""

    def __init__(self, cls: type) -> None:
        built: Any = cls  # a class that is not complete is completed here, or raises Pydantic's own error
        self._to_json = built.__pydantic_serializer__.to_json
        self._validate = built.__pydantic_validator__.validate_json
        self._nan_is_text = _config_of(cls).get("ser_json_inf_nan") == "strings"

    def encode(self, value: object, subject: str, *, stores_nul: bool, check: Check | None = None) -> str:
        """As :func:`~outboxio.support.codec.encode_object`."""
        return encode_object(
            value,
            subject,
            stores_nul=stores_nul,
            check=check,
            encode=self._encoded,
            nan_is_null=not self._nan_is_text,
        )

    def _encoded(self, value: Any) -> bytes:
        # No warnings about values of other types, because validation refuses such values.
        encoded: bytes = self._to_json(value, by_alias=True, round_trip=True, warnings=False)
        if b"NaN" in encoded or b"Infinity" in encoded:
            try:
                msgspec.json.decode(encoded)
            except msgspec.DecodeError:  # from ser_json_inf_nan="constants"
                raise ValueError(f"a number is NaN or infinite{not_finite_in(value)}") from None
        return encoded

    def decode(self, payload: Any) -> Any:
        """Decode a JSON text. Raises ``pydantic.ValidationError``, without the values, if it does not fit."""
        from pydantic import ValidationError

        try:
            return self._validate(payload if isinstance(payload, str | bytes) else bytes(payload))
        except ValidationError as error:
            refused = _without_input(error)
        raise refused  # outside of the block, because the traceback of the first error shows the values


def _without_input(error: Any) -> Exception:
    """Copy a Pydantic error without the values of the payload and the links to Pydantic's pages."""
    from pydantic import ValidationError
    from pydantic_core import InitErrorDetails, PydanticCustomError

    problems = error.errors(include_url=False, include_context=False, include_input=False)
    details = [
        InitErrorDetails(type=PydanticCustomError(one["type"], one["msg"]), loc=one["loc"], input=None)
        for one in problems
    ]
    return ValidationError.from_exception_data(error.title, details, "json", hide_input=True)


def _config_of(cls: Any) -> Mapping[str, Any]:
    config: Mapping[str, Any] = getattr(cls, "model_config", None) or getattr(cls, "__pydantic_config__", None) or {}
    return config


# --- classes that cannot be stored ---------------------------------------------------------------


def unfit_model(cls: Any) -> str | None:
    """Return why objects of a Pydantic class cannot be stored and read, or ``None``.

    A class whose annotations cannot be resolved yet is not checked.
    """
    if getattr(cls, "__pydantic_root_model__", False):
        return "it is a RootModel, and a payload is a JSON object: write a BaseModel with a field instead"
    if not _is_complete(cls):
        return None
    for path, reason in (*_misnamed(cls), *_secrets(cls, "", set()), *_not_in_json(cls.__pydantic_core_schema__, "")):
        return f"field {path.lstrip('.')!r} {reason}"
    return None


def _is_complete(cls: Any) -> bool:
    if not cls.__pydantic_complete__ and hasattr(cls, "model_rebuild"):
        cls.model_rebuild(raise_errors=False)
    return bool(cls.__pydantic_complete__)


def _misnamed(cls: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields that are written under a name that the class does not read."""
    config = _config_of(cls)
    by_name = config.get("populate_by_name") or config.get("validate_by_name")
    by_alias = config.get("validate_by_alias", True)
    for name, field in cls.__pydantic_fields__.items():
        written, read = field.serialization_alias or name, field.validation_alias
        names = {name} if by_name or read is None else set[str]()
        if by_alias and read is not None:
            names |= {choice for choice in getattr(read, "choices", (read,)) if isinstance(choice, str)}
        if written not in names and not field.exclude:
            yield name, f"is written as {written!r} and read as {sorted(names)}: give the field a single alias="


def _secrets(cls: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the fields that Pydantic writes as stars. A class with its own serializers is not checked."""
    from pydantic import Secret, SecretBytes, SecretStr

    decorators = cls.__pydantic_decorators__
    if id(cls) in seen or decorators.field_serializers or decorators.model_serializers:
        return
    seen.add(id(cls))
    for name, field in cls.__pydantic_fields__.items():
        if any("Serializer" in type(part).__name__ for part in field.metadata):
            continue
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, SecretStr | SecretBytes | Secret):
                yield (
                    f"{path}.{name}",
                    (f"is a {part.__name__}, which Pydantic writes as asterisks: remove the secret from the event"),
                )
            elif is_model(part):
                yield from _secrets(part, f"{path}.{name}", seen)


def _parts(annotation: Any) -> Iterator[Any]:
    yield typing.get_origin(annotation) or annotation
    for argument in typing.get_args(annotation):
        yield from _parts(argument)


def _not_in_json(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a core schema that JSON cannot hold. A part with user functions is not checked."""
    kind = str(schema.get("type"))
    if "serialization" in schema or kind.startswith("function-"):
        return
    if kind in _NOT_IN_JSON:
        name = getattr(schema.get("cls"), "__qualname__", "function")
        yield path, f"is of type {name}, which JSON cannot hold; add a serializer and a validator to it"
    for key in _CHILDREN:
        for name, part in _named(schema.get(key)):
            yield from _not_in_json(part, f"{path}.{name}" if key == "fields" and name else path)


def _named(part: object) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a part of a schema, each with the name of its field, or with an empty text."""
    if isinstance(part, Mapping):
        members = cast("Mapping[str, Any]", part)
        yield from members.items() if "type" not in members else [("", members)]  # the fields of a model, or a schema
    elif isinstance(part, list):
        for item in cast("list[object]", part):
            # A member of a union may have a label. A dataclass also has a list of the names of its fields.
            schema = cast("tuple[object, ...]", item)[0] if isinstance(item, tuple) else item
            if isinstance(schema, Mapping):
                inner = cast("Mapping[str, Any]", schema)
                yield inner.get("name", ""), inner


# --- the JSON of Ekbatan --------------------------------------------------------------------------
#
# The JSON of Ekbatan, for event classes with ``json_style="ekbatan"``.
#
# Keys are camelCase, decimals are numbers with all of their digits, enums are written by name. msgspec writes and reads
# enums by value. So the document of a class with enums is translated: wherever the class has an enum, the value is
# replaced by the name, or the name by the value.


STYLE = "ekbatan"

_encode = msgspec.json.Encoder(decimal_format="number").encode
_decode: Callable[[str | bytes], Any] = msgspec.json.Decoder(float_hook=Decimal).decode

Change = Callable[[type[Enum], Any], Any]
"""Changes the value of an enum to the name of the member, or back."""


def rename_of(json_style: str, name: str) -> str:
    """Return how the keys of an event class are spelled. Raises :class:`InvalidEvent` for an unknown style."""
    if json_style != STYLE:
        raise InvalidEvent(f"json_style of {name}", f"{json_style!r} is not a style; expected {STYLE!r}, or remove it")
    return "camel"


def has_style(cls: type) -> bool:
    """True if objects of a class are stored as Ekbatan stores them."""
    return getattr(cls, "__json_style__", None) == STYLE


def with_model(payload: str, model_id: str | None, model_type: str | None) -> str:
    """Return the payload with ``modelId`` and ``modelName`` first, unless the class has fields with these names."""
    named = {"modelId": model_id, "modelName": model_type}
    known = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    added = {key: value for key, value in named.items() if key not in known and value is not None}
    if not added:
        return payload
    first = msgspec.json.encode(added).decode()
    return f"{first[:-1]},{payload[1:]}" if known else first


class EkbatanCodec:
    """Encodes and decodes the objects of a struct class. Raises :class:`NameError` for an unresolvable type."""

    def __init__(self, cls: type) -> None:
        self._info = inspect.type_info(cls)
        self._decode: Callable[[Any], Any] = msgspec.json.Decoder(cls).decode
        self._has_enums = _has_enum(self._info, set())

    def encode(self, value: object, subject: str, *, stores_nul: bool, check: Check | None = None) -> str:
        """As :func:`~outboxio.support.codec.encode_object`."""
        return encode_object(value, subject, stores_nul=stores_nul, check=check, encode=self._encoded)

    def _encoded(self, value: Any) -> bytes:
        encoded = _encode(value)
        if self._has_enums and isinstance(value, msgspec.Struct):
            return _encode(_translated(_decode(encoded), self._info, _name_of))
        return encoded

    def decode(self, payload: Any) -> Any:
        """Decode a JSON text. Raises ``msgspec.ValidationError`` for a value that does not fit."""
        if self._has_enums:
            text = payload if isinstance(payload, str | bytes) else bytes(payload)
            payload = _encode(_translated(_decode(text), self._info, _value_of))
        return self._decode(payload)


def _name_of(enum: type[Enum], value: Any) -> str:
    return enum(int(value) if isinstance(value, Decimal) else value).name


def _value_of(enum: type[Enum], name: Any) -> Any:
    try:
        return enum[name].value
    except KeyError:
        raise msgspec.ValidationError(f"Invalid enum name, expected one of {', '.join(enum.__members__)}") from None


def _translated(document: Any, info: Any, change: Change) -> Any:
    """Translate the enums in a document."""
    if isinstance(info, inspect.Metadata):
        return _translated(document, info.type, change)
    if isinstance(info, inspect.UnionType):
        for member in info.types:
            if _fits(document, member):
                return _translated(document, member, change)
        return document
    if isinstance(info, inspect.EnumType):
        return change(info.cls, document) if isinstance(document, str | int) else document
    if isinstance(document, dict):
        return _translated_object(cast("dict[str, Any]", document), info, change)
    if isinstance(document, list):
        items = cast("list[object]", document)
        if isinstance(info, inspect.TupleType):
            pairs = zip(items, info.item_types, strict=False)
            return [_translated(item, of_item, change) for item, of_item in pairs]
        item_type = getattr(info, "item_type", None)
        return items if item_type is None else [_translated(item, item_type, change) for item in items]
    return document


def _translated_object(document: dict[str, Any], info: Any, change: Change) -> dict[str, Any]:
    if isinstance(info, inspect.DictType):
        return {
            _translated(key, info.key_type, change): _translated(value, info.value_type, change)
            for key, value in document.items()
        }
    fields = {field.encode_name: field.type for field in getattr(info, "fields", ())}
    return {key: _translated(value, fields[key], change) if key in fields else value for key, value in document.items()}


def _fits(document: Any, info: Any) -> bool:
    """True if the JSON value may be of this member of a union."""
    if isinstance(document, dict):
        return isinstance(info, inspect.DictType) or hasattr(info, "fields")
    if isinstance(document, list):
        return hasattr(info, "item_type") or hasattr(info, "item_types")
    return isinstance(info, inspect.EnumType) and isinstance(document, str | int)


def _has_enum(info: Any, seen: set[int]) -> bool:
    """True if a type has an enum in which a name differs from its value."""
    if id(info) in seen:
        return False
    seen.add(id(info))
    if isinstance(info, inspect.EnumType):
        return any(member.name != member.value for member in info.cls)
    return any(_has_enum(part, seen) for part in parts_of(info))


def parts_of(info: Any) -> Iterator[Any]:
    """Yield the types inside a type."""
    for field in getattr(info, "fields", ()):
        yield field.type
    for name in ("type", "key_type", "value_type", "item_type"):
        if hasattr(info, name):
            yield getattr(info, name)
    for name in ("types", "item_types"):
        yield from getattr(info, name, ())
