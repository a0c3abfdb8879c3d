"""``outboxio events``: the event types of the application's code, the AsyncAPI document, and the lock file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from outboxio.catalogue.event_types import EventType, classes_of, event_types, published
from outboxio.catalogue.lock import (
    BreakingChange,
    Lock,
    check,
    decoding_error,
    field_in,
    lock_text,
    locked,
    read_lock,
)
from outboxio.cli.answer import Exit, line, say, say_aside, say_json
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.inside import databases, handlers, registered_types
from outboxio.cli.options import Common
from outboxio.cli.target import TargetError
from outboxio.model.event import type_names
from outboxio.model.operating.groups import Search
from outboxio.model.payloads.classes import AnyEvent, version_in
from outboxio.operations.declared import counted
from outboxio.outbox import Outbox
from outboxio.storage.protocols import EventSummary
from outboxio.support.log import log_text

_ROWS = 100  # of each event type


class Catalogue(Common, frozen=True):
    """The options. The database is beside the code, and not in its place."""

    asyncapi: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an AsyncAPI 3.0 document; - is stdout.", show_default=False),
    ] = None
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with this lock file, as events.lock.json, and read its examples. Exits with 1 for a change "
            "that stored rows or existing readers do not survive. With --database, also reads the newest rows.",
            show_default=False,
        ),
    ] = None
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the lock file: schemas and examples of every version.", show_default=False
        ),
    ] = None

    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Also read the newest rows of this database.", show_default=False),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --database. Default: the outbox's.", show_default=False),
    ] = None

    def refuse_contradiction(self) -> None:
        """Raise :class:`TargetError` for options that exclude one another."""
        if self.check is not None and self.write is not None:
            raise TargetError("--check and --write exclude one another: check first, then write")
        if self.asyncapi == Path("-") and (self.check or self.write):
            raise TargetError("--asyncapi - writes to stdout, and takes neither --check nor --write; name a file")


async def events(
    outbox: Outbox, given: Catalogue, rows: AbstractAsyncContextManager[Outbox] | None, *, as_json: bool
) -> Exit:
    """List the event types, or write or check the files. ``rows``: the outbox of a database, to read its rows."""
    classes = classes_of(handlers(outbox), registered_types(outbox))
    emitted_by: Mapping[str, Sequence[str]] = {}
    faults: list[BreakingChange] = []
    if rows is not None:
        async with rows as stored:
            emitted_by = await stored.admin.emitters()
            faults = await _faults(stored, classes) if given.check is not None else []
    types = published(event_types(handlers(outbox), registered_types(outbox), outbox.namespace, emitted_by))
    code = Exit.FINE
    if given.write is not None:
        _write(given.write, types, classes, as_json=as_json)
    elif given.check is not None:
        code = _check(given.check, types, classes, faults, as_json=as_json)
    if given.asyncapi is not None:
        lock_file = given.check or given.write
        document = outbox.catalogue(emitted_by=emitted_by, lock_file=lock_file)
        _save(given.asyncapi, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n", "--asyncapi")
    elif given.write is None and given.check is None:
        _list(types, as_json=as_json, knows_emitters=rows is not None)
    return code


def _list(types: Sequence[EventType], *, as_json: bool, knows_emitters: bool) -> None:
    if as_json:
        say_json({"types": types})
        return
    if not types:
        say(line(("no event types are registered: import the modules that register handlers", "yellow")))
        return
    shown = Rows("type", Column("version", right=True), Column("handlers", folds=True), Column("relays", folds=True),
                 Column("emitted by", folds=True))  # fmt: skip
    for one in types:
        relays = (f"{relay.handler} → {relay.address or 'by event'}" for relay in one.relays)
        also = line((f"also {', '.join(one.aliases)}", "dim")) if one.aliases else None
        shown.add(
            line((one.name, "bold")), str(one.version), line(", ".join(one.handlers)), line(", ".join(relays)),
            line(", ".join(one.emitted_by)), below=also,
        )  # fmt: skip
    say(shown)
    if not knows_emitters:
        say_aside(line(("to see which actions emit them, add: --database URL", "dim")))


def _write(path: Path, types: Sequence[EventType], classes: Mapping[str, type[AnyEvent]], *, as_json: bool) -> None:
    former = read_lock(path) if path.exists() else Lock({})
    breaking = check(types, former, classes)
    _save(path, lock_text(locked(types, former, classes)), "--write")
    if as_json:
        say_json({"written": str(path), "breaking": breaking})
        return
    for change in breaking:
        say(line(("..", "yellow"), f"  accepted: {change}"))
    say(line(("ok", "green"), f"  wrote {counted(len(types), 'event type')} into {path}"))
    for one in types:
        if one.schema is not None and not one.examples:
            say(line(("..", "yellow"), f"  {one.name} has no example: write a class method __examples__"))


def _check(
    path: Path,
    types: Sequence[EventType],
    classes: Mapping[str, type[AnyEvent]],
    faults: Sequence[BreakingChange],
    *,
    as_json: bool,
) -> Exit:
    lock = read_lock(path)
    breaking = [*check(types, lock, classes), *faults]
    is_current = lock_text(lock) == lock_text(locked(types, lock, classes))
    if as_json:
        say_json({"ok": not breaking, "is_current": is_current, "breaking": breaking})
        return Exit.NO if breaking else Exit.FINE
    for change in breaking:
        say(line(("NO", "bold red"), f"  {change}"))
    if not breaking:
        say(
            line(("ok", "green"), f"  {counted(len(types), 'event type')}: stored rows and readers survive all changes")
        )
    if not breaking and not is_current:
        say(line(("..", "yellow"), f"  {path} does not have all changes yet: run --write {path}, and commit the file"))
    return Exit.NO if breaking else Exit.FINE


async def _faults(stored: Outbox, classes: Mapping[str, type[AnyEvent]]) -> list[BreakingChange]:
    """The event types with rows that are not read, among the newest rows of each type. Quotes no values of rows."""
    found: list[BreakingChange] = []
    for name, cls in sorted(classes.items()):
        search = Search(event_types=tuple(sorted(type_names(cls))))
        for database in databases(stored).values():
            rows = (await database.event_search.newest(stored.namespace, search, _ROWS)).rows
            faults = list(_unread(rows, cls))
            if faults:
                row, version, fault = faults[0]
                told = f"{len(faults)} of the newest {counted(len(rows), 'row')} cannot be read, as {row.id} of version"
                fix = f"let version {version} be read: a default, or an upcaster"
                found.append(BreakingChange(name, field_in(fault) or None, f"{told} {version}: {fault}", fix))
    return found


def _unread(rows: Sequence[EventSummary], cls: type[AnyEvent]) -> Iterator[tuple[EventSummary, int, str]]:
    for row in rows:
        version = 1 if row.headers is None else version_in(row.headers)
        error = decoding_error(cls, version, bytes(row.payload or b"null"))
        if error is not None:
            yield row, version, log_text(error)


def _save(path: Path, text: bytes, option: str) -> None:
    if path == Path("-"):
        sys.stdout.write(text.decode())
        return
    try:
        path.write_bytes(text)
    except OSError as error:
        raise TargetError(f"{option} {path} cannot be written: {error.strerror}; give another name") from error
