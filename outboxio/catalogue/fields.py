"""Lists the fields of a JSON Schema as table rows, with types as text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import msgspec
from msgspec import Struct

from outboxio.catalogue.schemas import Schema, resolved

_LIMITS = {
    "minimum": "at least {}", "exclusiveMinimum": "more than {}", "maximum": "at most {}",
    "exclusiveMaximum": "less than {}", "multipleOf": "a multiple of {}", "minLength": "length at least {}",
    "maxLength": "length at most {}", "minItems": "items: at least {}", "maxItems": "items: at most {}",
    "pattern": "matches {}",
}  # fmt: skip


_MOST = 500  # mutually recursive types would have an infinite number of fields


class Field(Struct, frozen=True):
    """A field of a payload."""

    path: str
    """The path, such as ``lines[].price``."""
    type: str
    required: bool
    notes: tuple[str, ...]
    """The description, the limits and the default."""


def fields_of(schema: Schema) -> list[Field]:
    """Return the first 500 fields of an object, each followed by its nested fields."""
    return list(islice(_fields(schema, schema, "", ()), _MOST))


def _fields(given: Any, root: Schema, path: str, inside: tuple[int, ...]) -> Iterator[Field]:
    schema = resolved(given, root)
    properties: dict[str, Any] = schema.get("properties", {})
    if id(properties) in inside:
        return  # a recursive type
    for name, one in properties.items():
        here = f"{path}.{name}" if path else name
        yield Field(here, _type(one, root), name in schema.get("required", ()), tuple(_notes(one, root)))
        for part, its_path in _objects(one, root, here):
            yield from _fields(part, root, its_path, (*inside, id(properties)))


def _objects(given: Any, root: Schema, path: str, around: tuple[str, ...] = ()) -> Iterator[tuple[Schema, str]]:
    """Yield the objects that a value may contain, each with its path. ``around``: the references followed so far."""
    if (reference := _reference(given)) in around:
        return
    schema, around = resolved(given, root), (*around, *filter(None, [reference]))
    if "properties" in schema:
        yield schema, path
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _objects(choice, root, path, around)
    if isinstance(schema.get("items"), dict):
        yield from _objects(schema["items"], root, f"{path}[]", around)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _objects(schema["additionalProperties"], root, f"{path}[...]", around)


def _reference(given: Any) -> str | None:
    return cast("Schema", given).get("$ref") if isinstance(given, dict) else None


def _type(given: Any, root: Schema, around: tuple[str, ...] = ()) -> str:
    if (reference := _reference(given)) in around:
        return str(reference).rpartition("/")[2]
    schema, around = resolved(given, root), (*around, *filter(None, [reference]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(one, root, around) for one in schema[key]))
    if "enum" in schema or "const" in schema:
        return " or ".join(_spelled(value) for value in schema.get("enum", [schema.get("const")]))
    kind: str | list[str] = schema.get("type", "any value")
    if kind == "array":
        if "prefixItems" in schema:
            return f"({', '.join(_type(one, root, around) for one in schema['prefixItems'])})"
        return f"list of {_type(schema.get('items', {}), root, around)}"
    if kind == "object":
        rest = schema.get("additionalProperties")
        return f"mapping to {_type(rest, root, around)}" if isinstance(rest, dict) else str(schema.get("title", kind))
    form = schema.get("format") or schema.get("contentEncoding")
    plain = kind if isinstance(kind, str) else " or ".join(kind)
    return f"{plain} ({form})" if form else plain


def _notes(given: Any, root: Schema) -> Iterator[str]:
    schema = resolved(given, root)
    if "description" in schema and "properties" not in schema:
        yield str(schema["description"])
    for choice in (schema, *(resolved(one, root) for one in schema.get("anyOf", ()))):
        yield from (text.format(choice[key]) for key, text in _LIMITS.items() if key in choice)
    if "default" in schema:
        yield f"default: {_spelled(schema['default'])}"


def _spelled(value: Any) -> str:
    return msgspec.json.encode(value).decode()
