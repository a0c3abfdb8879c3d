"""The lock file of event types: schemas and examples of every version, to check later builds against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from outboxio.catalogue.compatibility import Change, bare, breaking_changes
from outboxio.catalogue.event_types import EventType
from outboxio.catalogue.schemas import Schema
from outboxio.errors import ConfigurationError
from outboxio.model.event import type_name, upcasters_of, version_of
from outboxio.model.payloads.classes import AnyEvent, decoder_of, upcasting

_MOST_EXAMPLES = 10  # of a version


class LockedVersion(Struct, frozen=True):
    """A version of an event type. ``schema`` is ``None`` for a version that is older than the file."""

    schema: Schema | None = None
    examples: list[dict[str, Any]] = []


class LockedType(Struct, frozen=True):
    """An event type as it was when the file was written."""

    version: int
    aliases: list[str]
    versions: dict[int, LockedVersion]

    def __post_init__(self) -> None:
        if self.version not in self.versions:
            raise ValueError(f"version {self.version} is not among the versions")


class Lock(Struct, frozen=True):
    """The content of a lock file such as ``events.lock.json``."""

    events: dict[str, LockedType]
    format: Literal[1] = 1


class BreakingChange(Struct, frozen=True):
    """A change that breaks stored rows or existing readers."""

    event: str
    field: str | None
    """The path of the field, such as ``lines[].price``; ``None`` for the event type as a whole."""
    change: str
    fix: str

    def __str__(self) -> str:
        where = self.event if self.field is None else f"{self.event}, field {self.field}:"
        return f"{where} {self.change}. Fix: {self.fix}"


def read_lock(path: Path) -> Lock:
    """Read a lock file. Raises :class:`ConfigurationError` if it is missing or not a lock file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Lock)
    except FileNotFoundError:
        raise ConfigurationError(
            f"lock file {path} not found; create it with: outboxio events --write {path}"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} is not a lock file of event types: {error}") from None


def lock_text(lock: Lock) -> bytes:
    """Return the content of a lock file, with sorted keys, so that a diff shows only what has changed."""
    return (
        msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(lock, str_keys=True), order="sorted"), indent=2)
        + b"\n"
    )


def locked(types: Iterable[EventType], former: Lock, classes: Mapping[str, type[AnyEvent]]) -> Lock:
    """Return the lock for the current event types. Older versions and examples are kept if they can still be read."""
    events: dict[str, LockedType] = {}
    for one in types:
        cls = classes.get(one.name)
        if cls is None:
            continue  # handlers refer to the type by name, and read its rows as bytes
        versions = {number: LockedVersion() for number in one.upcasts}
        for name in (*one.aliases, one.name):
            versions |= former.events[name].versions if name in former.events else {}
        kept = {
            number: LockedVersion(each.schema, [e for e in each.examples if _fault(cls, number, e) is None])
            for number, each in versions.items()
            if number in one.upcasts or number == one.version
        }
        before = kept.get(one.version, LockedVersion()).examples
        examples = [*(each for each in one.examples if each not in before), *before][:_MOST_EXAMPLES]
        kept[one.version] = LockedVersion(one.schema, examples)
        events[one.name] = LockedType(one.version, list(one.aliases), kept)
    return Lock(events)


def check(types: Iterable[EventType], lock: Lock, classes: Mapping[str, type[AnyEvent]]) -> list[BreakingChange]:
    """Return the changes since the lock file that break stored rows or existing readers."""
    present = {name: one for one in types for name in (one.name, *one.aliases)}
    found: list[BreakingChange] = []
    for name, former in sorted(lock.events.items()):
        one = present.get(name)
        if one is None:
            found.append(_gone(name, former, present.values(), lock))
            continue
        for alias in sorted({*former.aliases} - present.keys()):
            fix = f"add {alias!r} to the aliases of {one.name}"
            found.append(BreakingChange(name, None, f"no longer reads rows of its alias {alias!r}", fix))
        found += _changes(one, former, classes.get(one.name))
    return found


def _gone(name: str, former: LockedType, present: Iterable[EventType], lock: Lock) -> BreakingChange:
    schema = former.versions[former.version].schema
    names = [one.name for one in present if one.name not in lock.events and schema and bare(one.schema) == bare(schema)]
    if names:
        fix = f"give {names[0]} aliases={{{name!r}}}, or type_name={name!r}"
        return BreakingChange(name, None, f"was renamed to {names[0]} without an alias", fix)
    fix = "keep the class and register it: outbox.register(...); when no rows or readers are left, run --write"
    return BreakingChange(name, None, "was removed", fix)


def _changes(one: EventType, former: LockedType, cls: type[AnyEvent] | None) -> Iterator[BreakingChange]:
    if cls is None or one.schema is None:
        yield BreakingChange(one.name, None, "no longer has a class", "register the class of the event type")
        return
    if one.version < former.version:
        fix = f"set version={former.version} again, or a higher version with an upcaster"
        yield BreakingChange(one.name, None, f"went from version {former.version} back to {one.version}", fix)
        return
    for number, version in sorted(former.versions.items()):
        changes = list[Change]()
        if number == one.version and version.schema is not None:
            changes = breaking_changes(version.schema, one.schema)
        elif (missing := _missing(one, number)) is not None:
            changes = [Change("", f"rows of version {number} have no upcaster from version {missing}", "write it")]
        for change in changes or _replayed(cls, number, version.examples):
            yield BreakingChange(one.name, change.field or None, change.text, _advice(one, number, change))


def _advice(one: EventType, number: int, change: Change) -> str:
    if number < one.version:
        step = f"@outboxio.upcaster({one.name}, from_version={number})"
        return f"write {step}" if change.fix == "write it" else f"{change.fix} in {step}"
    return f"{change.fix}, or set version={number + 1} and write @outboxio.upcaster({one.name}, from_version={number})"


def _missing(one: EventType, number: int) -> int | None:
    return next((step for step in range(number, one.version) if step not in one.upcasts), None)


def _replayed(cls: type[AnyEvent], number: int, examples: Iterable[dict[str, Any]]) -> Iterator[Change]:
    """Yield the first stored example of a version that the class can no longer read."""
    for example in examples:
        if (fault := _fault(cls, number, example)) is not None:
            text = f"an example of version {number} can no longer be read: {fault}"
            yield Change(field_in(fault), text, "handle such rows")
            return


def field_in(fault: str) -> str:
    """Return the path of the field in a decoder's error; empty if it has none."""
    return fault.rpartition("`$.")[2].partition("`")[0] if "`$." in fault else ""


def _fault(cls: type[AnyEvent], number: int, example: dict[str, Any]) -> str | None:
    error = decoding_error(cls, number, msgspec.json.encode(example))
    return None if error is None else " ".join(str(error).split())


def decoding_error(cls: type[AnyEvent], stored: int, payload: bytes) -> Exception | None:
    """Return the error from decoding a payload of a stored version; ``None`` if it can be decoded."""
    try:
        upcasting(type_name(cls), decoder_of(cls), stored, version_of(cls), upcasters_of(cls))(payload)
    except Exception as error:  # user-defined validation may raise any error
        return error
    return None
