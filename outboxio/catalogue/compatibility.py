"""Detects changes of a JSON Schema that break stored rows or readers.

Rows written with the old schema are read with the new one, so the new schema must accept everything that the old one
accepted. Other readers expect the properties of the old schema, so none may be removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from msgspec import Struct

from outboxio.catalogue.schemas import ALIASES, DIGITS, READS, Schema, as_schema, resolved

_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", *DIGITS)
_EQUAL = ("pattern", "format", "multipleOf", "contentEncoding", "uniqueItems")
_INSTEAD = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
_CHILDREN = ("properties", "additionalProperties", "propertyNames", "items", "prefixItems")
_ANY: Schema = {}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_PRESERVE = "keep accepting the old values"


class Change(Struct, frozen=True):
    """A breaking change of a field such as ``lines[].price``, or of the whole payload if the field is empty."""

    field: str
    text: str
    fix: str


def breaking_changes(old: Schema, new: Schema) -> list[Change]:
    """Return the breaking changes from one schema to the next, in the order of the fields."""
    return list(dict.fromkeys(_Comparison(old, new).of(old, new, "")))


class _Comparison:
    def __init__(self, old: Schema, new: Schema) -> None:
        self._old, self._new = old, new
        self._known: dict[Any, list[Change]] = {}

    def of(self, old: Any, new: Any, path: str) -> Iterator[Change]:
        if new is False:
            yield Change(path, "is no longer accepted", _PRESERVE)
            return
        olds, news = _choices(old, self._old), _choices(new, self._new)
        for choice in olds:
            found = [list(self._one(choice, each, path)) for each in news]
            if all(found):
                same = [changes for each, changes in zip(news, found, strict=True) if _kind(each) == _kind(choice)]
                yield from min(same, key=len) if same else [_lost_type(choice, news, path)]

    def _one(self, old: Schema, new: Schema, path: str) -> Iterator[Change]:
        """Yield the changes between two schemas without alternatives."""
        if _accepts_all(new):
            return
        kind, accepted = _kind(old), _kind(new)
        is_wider = accepted == "number" or new.get("format") == "decimal"
        if accepted is not None and accepted != kind and not (is_wider and kind in ("integer", "number")):
            yield _lost_type(old, [new], path)
            return
        yield from _enum_changes(old, new, path)
        yield from _bound_changes(_bounded(old), new, path)
        if kind in ("object", "array"):
            both = tuple((*(id(one.get(key)) for key in _CHILDREN), *one.get("required", ())) for one in (old, new))
            if both not in self._known:  # a recursive type, or one that several fields use
                self._known[both] = []
                parts = self._object if kind == "object" else self._array
                self._known[both] = list(dict.fromkeys(parts(old, new, path)))
            yield from self._known[both]

    def _object(self, old: Schema, new: Schema, path: str) -> Iterator[Change]:
        before, after = old.get("properties", {}), new.get("properties", {})
        read_as = {alias: name for name, one in after.items() for alias in _aliases(one)} | {n: n for n in after}
        added = [name for name in after if name not in before and not any(read_as.get(o) == name for o in before)]
        for name, schema in before.items():
            if (current := read_as.get(name)) is not None:
                yield from self.of(schema, after[current], _joined(path, name))
            else:
                same = [one for one in added if bare(after[one]) == bare(schema)]
                yield _removed(_joined(path, name), same[0] if same else None)
            for alias in _aliases(schema):
                if alias not in read_as:
                    yield Change(_joined(path, name), f"is no longer read as {alias!r}", f"keep the alias {alias!r}")
        for name in new.get("required", ()):
            formers = [each for each in before if read_as.get(each) == name]
            if not any(each in old.get("required", ()) for each in formers):
                text = "was made required" if formers else "was added and is required"
                yield Change(_joined(path, name), text, "give the field a default")
        yield from self._rest(old, new, path)

    def _rest(self, old: Schema, new: Schema, path: str) -> Iterator[Change]:
        """Yield the changes of keys that are not properties of the old schema."""
        before, after = old.get("additionalProperties", True), new.get("additionalProperties", True)
        value = cast("Schema", before) if isinstance(before, dict) else _ANY
        if after is False and before is not False:
            yield Change(path, "no longer accepts unknown fields", "accept unknown fields")
        elif isinstance(after, dict) and "properties" not in new:
            yield from self.of(value, after, f"{path}[...]")
        if isinstance(before, dict) or "properties" not in old:  # a mapping: its rows may have any key
            for name, schema in new.get("properties", {}).items():
                if name not in old.get("properties", {}):
                    yield from self.of(value, schema, _joined(path, name))
            keys = [{"type": "string", **one.get("propertyNames", {})} for one in (old, new)]
            yield from self.of(keys[0], keys[1], f"{path}[key]")

    def _array(self, old: Schema, new: Schema, path: str) -> Iterator[Change]:
        firsts, nexts = old.get("prefixItems", []), new.get("prefixItems", [])
        for place in range(max(len(firsts), len(nexts))):
            before = firsts[place] if place < len(firsts) else old.get("items", _ANY)
            after = nexts[place] if place < len(nexts) else new.get("items", _ANY)
            if before is not False:
                yield from self.of(before, after, f"{path}[{place}]")
        if old.get("items", _ANY) is not False and old.get("maxItems") != len(firsts):
            yield from self.of(old.get("items", _ANY), new.get("items", _ANY), f"{path}[]")


def _removed(path: str, successor: str | None) -> Change:
    if successor is None:
        return Change(path, "was removed", "keep the field")
    name = path.rpartition(".")[2]
    fix = f"keep the stored name of {successor!r}: msgspec.field(name={name!r}), or Field(alias={name!r}) in Pydantic"
    return Change(path, f"was renamed to {successor!r}", fix)


def _enum_changes(old: Schema, new: Schema, path: str) -> Iterator[Change]:
    if "enum" not in new:
        return
    if "enum" not in old:
        yield Change(path, f"now accepts only {_listed(new['enum'])}", _PRESERVE)
    elif gone := [value for value in old["enum"] if value not in new["enum"]]:
        yield Change(path, f"no longer accepts {_listed(gone)}", f"keep {_listed(gone)}")


def _bounded(schema: Schema) -> Schema:
    """Add the bounds of the enum values to a schema."""
    values = schema.get("enum", ())
    if values and _kind(schema) in ("integer", "number"):
        return {**schema, "minimum": min(values), "maximum": max(values)}
    if values and _kind(schema) == "string":
        return {**schema, "minLength": min(map(len, values)), "maxLength": max(map(len, values))}
    return schema


def _bound_changes(old: Schema, new: Schema, path: str) -> Iterator[Change]:
    for key in (*_LOWER, *_UPPER, *_EQUAL, READS):
        before, after = old.get(key, old.get(_INSTEAD.get(key, ""))), new.get(key)
        if after is None or after == before or (key == "format" and (READS in new or _kind(old) != "string")):
            continue
        if before is None or key in _EQUAL:
            is_tighter = before is None or key != "multipleOf" or before % after != 0
        elif key == READS:
            is_tighter = not {*before} <= {*after}
        else:
            is_tighter = after > before if key in _LOWER else after < before
        if is_tighter:
            was = "new" if before is None else f"was {before!r}"
            yield Change(path, f"was narrowed: {key} is {after!r} ({was})", _PRESERVE)


def _lost_type(old: Schema, news: list[Schema], path: str) -> Change:
    kind = _kind(old) or "any value"
    if kind == "null":
        return Change(path, "no longer accepts null", "keep accepting null")
    accepted = " or ".join(sorted({_kind(new) or "any value" for new in news}))
    return Change(path, f"accepted {kind}, but now accepts only {accepted}", _PRESERVE)


def _choices(given: Any, root: Schema) -> list[Schema]:
    """Return the alternatives of a schema, each with at most one type."""
    schema = resolved(given, root)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            tag = schema.get("discriminator", {}).get("propertyName")
            found = [choice for each in schema[key] for choice in _choices(each, root)]
            return [_requiring(tag, each) for each in found] if tag else found
    if len(schema.get("allOf", ())) == 1:
        return _choices(schema["allOf"][0], root)
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": kind} for kind in schema["type"]]
    if "enum" in schema and "type" not in schema:
        by_kind: dict[str | None, list[object]] = {}
        for value in schema["enum"]:
            by_kind.setdefault(_KINDS.get(value.__class__), []).append(value)
        return [{**schema, "type": kind, "enum": values} for kind, values in by_kind.items()]
    return [schema]


def _requiring(name: str, schema: Schema) -> Schema:
    """Make the discriminator of a union required in one of its alternatives."""
    required = schema.get("required", ())
    return schema if name in required or "properties" not in schema else {**schema, "required": [*required, name]}


def _kind(schema: Schema) -> str | None:
    return str(schema["type"]) if "type" in schema else None


def _accepts_all(schema: Schema) -> bool:
    return not ({"type", "enum", "properties", "allOf", "not"} & schema.keys())


def _aliases(schema: Any) -> list[str]:
    return list(as_schema(schema).get(ALIASES, ()))


def bare(schema: Any) -> Any:
    """Return a schema without its titles, descriptions, examples and aliases."""
    texts = ("title", "description", "examples", ALIASES)
    return {key: value for key, value in as_schema(schema).items() if key not in texts}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(values: list[Any]) -> str:
    return ", ".join(map(repr, values))
