"""Generates the JSON Schema of an event class of any kind, and examples of its payload."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, cast

import msgspec
from msgspec import inspect

from outboxio.model.event import type_name
from outboxio.model.payloads.classes import decoder_of, encoder_of
from outboxio.model.payloads.fields import stored_class
from outboxio.model.payloads.models import has_style, is_model, parts_of

Schema = dict[str, Any]
"""A JSON Schema as decoded JSON. Definitions are under ``$defs``."""

_DEFS = "#/$defs/"
ALIASES = "x-outboxio-aliases"
"""Other names under which a property is read."""
READS = "x-outboxio-reads"
"""The accepted date and time texts: with an offset, without (``local``), or both."""
DIGITS = ("x-outboxio-max-digits", "x-outboxio-decimal-places")
_MOST_REPAIRS = 20
_DEEPEST = 3  # references, below which a generated example has only required fields
EXAMPLES_HOOK = "__examples__"
"""The class method of an event class that returns example events."""


def schema_of(cls: Any) -> Schema:
    """Return the JSON Schema of the stored payload of an event class.

    A part that JSON Schema cannot describe accepts any value.
    """
    if is_model(cls):
        return _of_model(cls)
    [schema], parts = msgspec.json.schema_components(
        [stored_class(cls)], schema_hook=lambda part: {"title": part.__name__}, ref_template=_DEFS + "{name}"
    )
    _complete(inspect.type_info(stored_class(cls)), schema, parts, set())
    found = _flat({**schema, "$defs": parts})
    return _in_style(found, cls) if has_style(cls) else found


def _complete(info: Any, part: Any, parts: Schema, seen: set[int]) -> None:
    """Add what msgspec omits from a schema: the formats of dates and times, and of mapping keys."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if not isinstance(part, dict):
        return
    found = cast("Schema", part)
    part = parts.get(str(found.get("$ref", "")).removeprefix(_DEFS), found)
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(info, inspect.DateTimeType | inspect.TimeType):
        kind = "datetime" if isinstance(info, inspect.DateTimeType) else "time"
        part[READS] = [text for text, tz in ((kind, True), (f"local {kind}", False)) if info.tz in (tz, None)]
    elif isinstance(info, inspect.DictType):
        if (keys := _keys(info.key_type)) is not None:
            part["propertyNames"] = keys
        _complete(info.value_type, part.get("additionalProperties"), parts, seen)
    elif isinstance(info, inspect.UnionType):
        for one, choice in zip(sorted(info.types, key=_place), _leaves(part), strict=False):
            _complete(one, choice, parts, seen)
    elif isinstance(info, inspect.CollectionType):
        _complete(info.item_type, part.get("items"), parts, seen)
    elif isinstance(info, inspect.TupleType):
        for one, item in zip(info.item_types, part.get("prefixItems", ()), strict=False):
            _complete(one, item, parts, seen)
    elif "properties" in part:
        for field in getattr(info, "fields", ()):
            _complete(field.type, part["properties"].get(field.encode_name), parts, seen)
    elif "prefixItems" in part:
        for field, item in zip(
            reversed(getattr(info, "fields", ())), reversed(part["prefixItems"]), strict=False
        ):  # a tag is first
            _complete(field.type, item, parts, seen)


def _keys(info: Any) -> Schema | None:
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.StrType | inspect.AnyType):
        return None
    if isinstance(info, inspect.EnumType):
        return {"enum": sorted(str(one.value) for one in info.cls)}
    if isinstance(info, inspect.LiteralType):
        return {"enum": sorted(map(str, info.values))}
    return {"format": type(info).__name__.removesuffix("Type").lower()}


def _place(info: Any) -> int:
    """Return the position of an alternative in an msgspec schema: other types, structs, null."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.StructType):
        return 0 if info.array_like else 1
    return 2 if isinstance(info, inspect.NoneType) else 0


def _leaves(part: Schema) -> Iterator[Schema]:
    for one in part.get("anyOf", [part]):
        yield from _leaves(one) if "anyOf" in one else [one]


def _of_model(cls: Any) -> Schema:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Lenient(GenerateJsonSchema):
        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Schema:
            return {}

        def decimal_schema(self, schema: Any) -> Schema:
            found = super().decimal_schema(schema)
            limits = {
                key: schema[name]
                for key, name in zip(DIGITS, ("max_digits", "decimal_places"), strict=True)
                if name in schema
            }
            number, *texts = found.get("anyOf", (found,))
            number |= limits
            for text in texts:
                text |= {**number, "type": "string", "format": "decimal"}
            return found

        def dict_schema(self, schema: Any) -> Schema:
            kind = schema.get("keys_schema", {}).get("type")
            keys = {"propertyNames": {"format": kind}} if kind in ("int", "float", "decimal", "bool") else {}
            return {**keys, **super().dict_schema(schema)}

        def datetime_schema(self, schema: Any) -> Schema:
            only = {"aware": ["datetime"], "naive": ["local datetime"]}.get(schema.get("tz_constraint"))
            return {**super().datetime_schema(schema), READS: only or ["datetime", "local datetime"]}

        def model_schema(self, schema: Any) -> Schema:
            found = super().model_schema(schema)
            for name, field in schema["cls"].__pydantic_fields__.items():
                names = [one for one in getattr(field.validation_alias, "choices", ()) if isinstance(one, str)]
                shown = found.get("properties", {}).get(names[0] if names else name)
                if shown is not None and names[1:]:
                    shown[ALIASES] = names[1:]
            return found

    return _flat(TypeAdapter(cls).json_schema(ref_template=_DEFS + "{model}", schema_generator=Lenient))


def _flat(schema: Schema) -> Schema:
    """Replace a top-level reference by its definition, and drop unused definitions."""
    parts = schema.pop("$defs", {})
    main: Schema = schema
    if "$ref" in schema:
        main = {**parts[schema["$ref"].removeprefix(_DEFS)], **{k: v for k, v in schema.items() if k != "$ref"}}
    used: set[str] = set()
    _collect(main, parts, used)
    return {**main, **({"$defs": {name: parts[name] for name in sorted(used)}} if used else {})}


def _collect(node: object, parts: Mapping[str, Any], used: set[str]) -> None:
    for part in walked(node):
        name = str(part.get("$ref", "")).removeprefix(_DEFS)
        if name in parts and name not in used:
            used.add(name)
            _collect(parts[name], parts, used)


def walked(node: object) -> Iterator[dict[str, Any]]:
    """Yield all JSON objects in a document, outermost first."""
    if isinstance(node, dict):
        found = cast("dict[str, Any]", node)
        yield found
        for value in found.values():
            yield from walked(value)
    elif isinstance(node, list):
        for value in cast("list[object]", node):
            yield from walked(value)


def _in_style(schema: Schema, cls: Any) -> Schema:
    """Adapt a schema to Ekbatan's JSON, in which decimals are numbers and enums are written by name."""
    enums: dict[str, type[Enum]] = {}
    _find_enums(inspect.type_info(cls), enums, set())
    for part in walked(schema):
        if part.get("format") == "decimal":
            del part["format"]
            part["type"] = "number"
        elif "enum" in part and part.get("title") in enums:
            part["enum"] = sorted(enums[part["title"]].__members__)
    text = {"type": "string"}
    added = {name: text for name in ("modelId", "modelName") if name not in schema["properties"]}
    return {**schema, "properties": {**added, **schema["properties"]}}


def _find_enums(info: Any, found: dict[str, type[Enum]], seen: set[int]) -> None:
    if id(info) not in seen:
        seen.add(id(info))
        if isinstance(info, inspect.EnumType):
            found[info.cls.__name__] = info.cls
        for part in parts_of(info):
            _find_enums(part, found, seen)


def as_schema(value: Any) -> Schema:
    """Return the value if it is an object, else ``{}``, which accepts any value as the schema ``True`` does."""
    return cast("Schema", value) if isinstance(value, dict) else {}


def resolved(given: Any, root: Schema) -> Schema:
    """Return the schema that a reference points to."""
    schema: Schema = as_schema(given)
    while "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(_DEFS)
        beside: Schema = {key: value for key, value in schema.items() if key != "$ref"}
        schema = as_schema(root.get("$defs", {}).get(name)) | beside
    return schema


# --- examples -------------------------------------------------------------------------------------


def examples_of(cls: Any, schema: Schema) -> list[dict[str, Any]]:
    """Return example payloads: from the class method ``__examples__``, else from the schema, else a generated one.

    Empty if the class does not accept the generated payload. Raises :class:`InvalidEvent` for an event of
    ``__examples__`` that cannot be stored.
    """
    subject = f"example of event {type_name(cls)}"
    if EXAMPLES_HOOK in vars(cls):  # not inherited: the events of a base class have another type
        return [_encoded(event, cls, subject) for event in getattr(cls, EXAMPLES_HOOK)()]
    given: list[Any] = schema.get("examples", [])
    made = [one for payload in given for one in _read_back(payload, cls, subject)]
    return made or _read_back(_sample(schema, schema, ()), cls, subject)


def _read_back(payload: Any, cls: Any, subject: str) -> list[dict[str, Any]]:
    for _ in range(_MOST_REPAIRS):
        try:
            return [_encoded(decoder_of(cls)(msgspec.json.encode(payload)), cls, subject)]
        except Exception as error:  # a pattern, or validation that the schema does not describe
            if not _repaired(payload, str(error)):
                return []
    return []


def _repaired(payload: Any, fault: str) -> bool:
    """Replace the text that a decoder rejected with a local date and time, for which msgspec gives no format."""
    found = re.fullmatch(r"Invalid RFC3339 encoded (datetime|time) - at `\$(.*)`", fault)
    path: list[Any] = re.findall(r"\.(\w+)|\[(\d+)\]", found[2]) if found else []
    for name, place in path[:-1]:
        payload = payload[name or int(place)]
    if found and path:
        payload[path[-1][0] or int(path[-1][1])] = "2026-01-31T12:00:00" if found[1] == "datetime" else "12:00:00"
    return bool(path)


def _encoded(event: Any, cls: Any, subject: str) -> dict[str, Any]:
    payload: dict[str, Any] = msgspec.json.decode(encoder_of(cls)(event, subject, stores_nul=False))
    return payload


_TEXTS = {
    "uuid": "0198c0de-0000-7000-8000-000000000001", "date-time": "2026-01-31T12:00:00Z", "date": "2026-01-31",
    "time": "12:00:00Z", "duration": "PT1H", "decimal": "10.00", "email": "ada@example.org",
    "uri": "https://example.org/", "ipv4": "192.0.2.1", "ipv6": "2001:db8::1",
}  # fmt: skip


_KINDS = ("object", "array", "string", "integer", "number", "boolean", "null")


def _sample(given: Any, root: Schema, inside: tuple[str, ...]) -> Any:
    """Return a value that a schema accepts. ``inside``: the enclosing references, to stop recursion."""
    reference = str(as_schema(given).get("$ref", ""))
    schema = resolved(given, root)
    for key in ("examples", "const", "default", "enum"):
        if schema.get(key) is not None:
            return schema[key][0] if key in ("examples", "enum") else schema[key]
    inside = (*inside, reference) if reference else inside
    for key in ("anyOf", "oneOf", "allOf"):
        choices: list[Any] = schema.get(key, [])
        if choices:
            kept = [one for one in choices if not _refers(one, inside) and as_schema(one).get("type") != "null"]
            return _sample(kept[0], root, inside) if kept else None
    kind: Any = schema.get("type")
    if kind not in _KINDS:
        kind = next(iter(kind or ()), None)  # a list of kinds
    if kind == "object":
        return _sample_object(schema, root, inside)
    if kind == "array":
        items: list[Any] = schema.get("prefixItems") or [schema.get("items", {})] * max(1, schema.get("minItems", 0))
        return [_sample(one, root, inside) for one in items if not _refers(one, inside)]
    return _sample_leaf(kind, schema)


def _sample_object(schema: Schema, root: Schema, inside: tuple[str, ...]) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    return {
        name: _sample(one, root, inside)
        for name, one in properties.items()
        if name in required or (len(inside) < _DEEPEST and not _refers(one, inside))
    }


def _sample_leaf(kind: Any, schema: Schema) -> Any:
    if kind in ("integer", "number"):
        step = schema.get("multipleOf", 1)
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + step)
        return min(least, schema.get("maximum", schema.get("exclusiveMaximum", least + 1) - step))
    if kind == "string":
        text = _TEXTS.get(schema.get("format", ""), "")
        return text or "text".ljust(schema.get("minLength", 0), "t")[: schema.get("maxLength")]
    return True if kind == "boolean" else None


def _refers(schema: Any, inside: tuple[str, ...]) -> bool:
    return as_schema(schema).get("$ref") in inside
