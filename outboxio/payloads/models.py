"""Pydantic models and Pydantic dataclasses: encoded and decoded by Pydantic, in its JSON mode.

A model is stored under its aliases and without its computed fields, so that the stored object is an input of the same
model. Pydantic is not imported before a class of an application is a Pydantic class.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from outboxio.support.codec import Check, encode_object, not_finite_in

_NOT_IN_JSON = ("is-instance", "is-subclass", "callable")
_CHILDREN = (
    "schema", "lax_schema", "json_schema", "items_schema", "keys_schema", "values_schema", "extras_schema", "fields",
    "choices", "definitions",
)  # fmt: skip

_QUOTING = ("value_error", "assertion_error", "union_tag_invalid")


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
        # Warnings would tell of values of other types. The check of an event refuses such values.
        encoded: bytes = self._to_json(value, by_alias=True, round_trip=True, warnings=False)
        if b"NaN" in encoded or b"Infinity" in encoded:
            try:
                msgspec.json.decode(encoded)
            except msgspec.DecodeError:  # by ser_json_inf_nan="constants"
                raise ValueError(f"a number is NaN or infinite{not_finite_in(value)}") from None
        return encoded

    def decode(self, payload: Any) -> Any:
        """The object of a JSON text."""
        from pydantic import ValidationError

        try:
            return self._validate(payload if isinstance(payload, str | bytes) else bytes(payload))
        except ValidationError as error:
            problem: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Outside of the block, because the traceback of Pydantic's error shows the values.
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
        told = msgspec.ValidationError(f"{problem['msg']} - at `${path}`" if path else problem["msg"])
        # A log leaves out the text of an error that has a cause, as of a check in ``__post_init__``.
        raise told from (ValueError(problem["msg"]) if _may_quote(problem["type"]) else None)


def _may_quote(problem: str) -> bool:
    """True if the message of a problem may hold values: the messages of the application's own checks do."""
    from pydantic_core.core_schema import ErrorType

    return problem in _QUOTING or problem not in typing.get_args(ErrorType)


def _config_of(cls: Any) -> Mapping[str, Any]:
    config: Mapping[str, Any] = getattr(cls, "model_config", None) or getattr(cls, "__pydantic_config__", None) or {}
    return config


# --- classes that cannot be stored ---------------------------------------------------------------


def unfit_model(cls: Any) -> str | None:
    """The reason why no object of a Pydantic class can be stored and read, or ``None``.

    A class with annotations of names that are not defined yet is not judged.
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
    """The fields that are written under a name under which the class does not read them."""
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
    """The fields of which Pydantic writes only stars. A class with serializers of its own is not judged."""
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
                    (f"is a {part.__name__}, of which JSON would hold only stars: leave the secret out of the event"),
                )
            elif is_model(part):
                yield from _secrets(part, f"{path}.{name}", seen)


def _parts(annotation: Any) -> Iterator[Any]:
    yield typing.get_origin(annotation) or annotation
    for argument in typing.get_args(annotation):
        yield from _parts(argument)


def _not_in_json(schema: Any, path: str) -> Iterator[tuple[str, str]]:
    """The parts of a core schema that JSON cannot hold. A part with functions of the application is not judged."""
    kind = str(schema.get("type"))
    if "serialization" in schema or kind.startswith("function-"):
        return
    if kind in _NOT_IN_JSON:
        told = getattr(schema.get("cls"), "__qualname__", "function")
        yield path, f"is of type {told}, which JSON cannot hold; give it a serializer and a validator"
    for key in _CHILDREN:
        for name, part in _named(schema.get(key)):
            yield from _not_in_json(part, f"{path}.{name}" if key == "fields" and name else path)


def _named(part: object) -> Iterator[tuple[str, Any]]:
    """The schemas in a part of a schema, each with the name of a field, or with an empty text."""
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
