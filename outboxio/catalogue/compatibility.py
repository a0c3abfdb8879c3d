"""Which changes of a JSON Schema stored rows and readers do not survive.

Rows were written under the former schema, and are read under the present one: so the present schema must accept all
that the former accepted. Readers elsewhere expect the properties of the former schema: so none may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from outboxio.catalogue.schemas import ALIASES, Schema, as_schema, resolved

_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_EQUAL = ("pattern", "format", "multipleOf", "contentEncoding", "uniqueItems")
_ANY: Schema = {}
_PRESERVE = "keep accepting the former values"


class Change(Struct, frozen=True):
    """A change that breaks readers, at a field (``lines[].price``; empty for the whole payload)."""

    field: str
    text: str
    fix: str


def breaking_changes(old: Schema, new: Schema) -> list[Change]:
    """The changes from one schema to the next, in the order of the fields."""
    return list(dict.fromkeys(_Comparison(old, new).of(old, new, "")))


class _Comparison:
    def __init__(self, old: Schema, new: Schema) -> None:
        self._old, self._new = old, new
        self._inside: set[tuple[int, int]] = set()

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
        """The changes between two schemas without alternatives."""
        if _accepts_all(new):
            return
        kind, accepted = _kind(old), _kind(new)
        if accepted is not None and accepted != kind and (kind, accepted) != ("integer", "number"):
            yield _lost_type(old, [new], path)
            return
        yield from _enum_changes(old, new, path)
        if "enum" not in old:
            yield from _bound_changes(old, new, path)
        if kind == "object":
            yield from self._object(old, new, path)
        elif kind == "array":
            yield from self._array(old, new, path)

    def _object(self, old: Schema, new: Schema, path: str) -> Iterator[Change]:
        before, after = old.get("properties", {}), new.get("properties", {})
        pair = (id(before), id(after))
        if pair in self._inside:
            return  # a type that contains itself
        self._inside.add(pair)
        read_as = {alias: name for name, one in after.items() for alias in _aliases(one)} | {n: n for n in after}
        added = [name for name in after if name not in before and not any(read_as.get(o) == name for o in before)]
        for name, schema in before.items():
            if (current := read_as.get(name)) is not None:
                yield from self.of(schema, after[current], _joined(path, name))
            else:
                same = [one for one in added if bare(after[one]) == bare(schema)]
                yield _removed(_joined(path, name), same[0] if same else None)
        for name in new.get("required", ()):
            formers = [each for each in before if read_as.get(each) == name]
            if not any(each in old.get("required", ()) for each in formers):
                told = "was made required" if formers else "was added and is required"
                yield Change(_joined(path, name), told, "give the field a default")
        rest_before, rest = old.get("additionalProperties", True), new.get("additionalProperties", True)
        if rest is False and rest_before is not False:
            yield Change(path, "does not accept unknown fields any more", "accept unknown fields")
        elif isinstance(rest, dict) and not after:
            yield from self.of(rest_before if isinstance(rest_before, dict) else _ANY, rest, f"{path}[...]")
        self._inside.discard(pair)

    def _array(self, old: Schema, new: Schema, path: str) -> Iterator[Change]:
        firsts, nexts = old.get("prefixItems", []), new.get("prefixItems", [])
        for place in range(max(len(firsts), len(nexts))):
            before = firsts[place] if place < len(firsts) else old.get("items", _ANY)
            after = nexts[place] if place < len(nexts) else new.get("items", _ANY)
            if before is not False:
                yield from self.of(before, after, f"{path}[{place}]")
        if old.get("items", _ANY) is not False:
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
        yield Change(path, f"accepts only {_listed(new['enum'])} now", _PRESERVE)
    elif gone := [value for value in old["enum"] if value not in new["enum"]]:
        yield Change(path, f"no longer accepts {_listed(gone)}", f"keep {_listed(gone)}")


def _bound_changes(old: Schema, new: Schema, path: str) -> Iterator[Change]:
    for key in (*_LOWER, *_UPPER, *_EQUAL):
        before, after = old.get(key), new.get(key)
        if after is None or after == before:
            continue
        is_tighter = before is None or key in _EQUAL or (after > before if key in _LOWER else after < before)
        if is_tighter:
            was = "new" if before is None else f"was {before!r}"
            yield Change(path, f"was narrowed: {key} is {after!r} ({was})", _PRESERVE)


def _lost_type(old: Schema, news: list[Schema], path: str) -> Change:
    kind = _kind(old) or "any value"
    if kind == "null":
        return Change(path, "does not accept null any more", "keep accepting null")
    accepted = " or ".join(sorted({_kind(new) or "any value" for new in news}))
    return Change(path, f"accepted {kind}, and accepts only {accepted} now", _PRESERVE)


def _choices(given: Any, root: Schema) -> list[Schema]:
    """The alternatives of a schema, each with one type at most."""
    schema = resolved(given, root)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return [choice for each in schema[key] for choice in _choices(each, root)]
    if len(schema.get("allOf", ())) == 1:
        return _choices(schema["allOf"][0], root)
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": kind} for kind in schema["type"]]
    return [schema]


def _kind(schema: Schema) -> str | None:
    if "type" in schema:
        return str(schema["type"])
    values = schema.get("enum", ())
    if values and all(isinstance(value, str) for value in values):
        return "string"
    return "integer" if values and all(isinstance(value, int) for value in values) else None


def _accepts_all(schema: Schema) -> bool:
    return not ({"type", "enum", "properties", "allOf", "not"} & schema.keys())


def _aliases(schema: Any) -> list[str]:
    return list(as_schema(schema).get(ALIASES, ()))


def bare(schema: Any) -> Any:
    """A schema without its texts."""
    texts = ("title", "description", "examples", ALIASES)
    return {key: value for key, value in as_schema(schema).items() if key not in texts}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(values: list[Any]) -> str:
    return ", ".join(map(repr, values))
