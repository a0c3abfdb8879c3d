"""``outboxio events``: the event types in your code, the AsyncAPI document, and the lock file."""

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
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.internals import databases, handlers, registered_types
from outboxio.cli.options import Common
from outboxio.cli.output import Exit, echo, echo_json, echo_stderr, line
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
    """The options of the command. The database is read in addition to the code."""

    asyncapi: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an AsyncAPI 3.0 document; - for stdout.", show_default=False),
    ] = None
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with this lock file, as in events.lock.json, and decode its examples. Exits with 1 for a "
            "change that breaks stored rows or existing readers. With --database, also decodes the newest rows.",
            show_default=False,
        ),
    ] = None
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the lock file: schemas and examples of all versions.", show_default=False
        ),
    ] = None

    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Also read the newest rows of this database.", show_default=False),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --database: the namespace. Default: that of the outbox.", show_default=False
        ),
    ] = None

    def refuse_contradiction(self) -> None:
        """Raise :class:`TargetError` for options that exclude each other."""
        if self.check is not None and self.write is not None:
            raise TargetError("--check and --write exclude each other: check first, then write")
        if self.asyncapi == Path("-") and (self.check or self.write):
            raise TargetError(
                "--asyncapi - cannot be used with --check or --write, which also print to stdout; name a file"
            )


async def events(
    outbox: Outbox, options: Catalogue, rows: AbstractAsyncContextManager[Outbox] | None, *, as_json: bool
) -> Exit:
    """List the event types, or write or check the files. ``rows``: the outbox of a database, to read its rows."""
    classes = classes_of(handlers(outbox), registered_types(outbox))
    emitted_by: Mapping[str, Sequence[str]] = {}
    faults: list[BreakingChange] = []
    if rows is not None:
        async with rows as stored:
            emitted_by = await stored.admin.emitters()
            faults = await _faults(stored, classes) if options.check is not None else []
    types = published(event_types(handlers(outbox), registered_types(outbox), outbox.namespace, emitted_by))
    code = Exit.OK
    if options.write is not None:
        _write(options.write, types, classes, as_json=as_json)
    elif options.check is not None:
        code = _check(options.check, types, classes, faults, as_json=as_json)
    if options.asyncapi is not None:
        lock_file = options.check or options.write
        document = outbox.catalogue(emitted_by=emitted_by, lock_file=lock_file)
        _save(options.asyncapi, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n", "--asyncapi")
    elif options.write is None and options.check is None:
        _list(types, as_json=as_json, knows_emitters=rows is not None)
    return code


def _list(types: Sequence[EventType], *, as_json: bool, knows_emitters: bool) -> None:
    if as_json:
        echo_json({"types": types})
        return
    if not types:
        echo(line(("no event types are registered; import the modules that register handlers", "yellow")))
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
    echo(shown)
    if not knows_emitters:
        echo_stderr(line(("to see which actions emit them, add: --database URL", "dim")))


def _write(path: Path, types: Sequence[EventType], classes: Mapping[str, type[AnyEvent]], *, as_json: bool) -> None:
    former = read_lock(path) if path.exists() else Lock({})
    breaking = check(types, former, classes)
    _save(path, lock_text(locked(types, former, classes)), "--write")
    if as_json:
        echo_json({"written": str(path), "breaking": breaking})
        return
    for change in breaking:
        echo(line(("WARN", "yellow"), f"  accepted: {change}"))
    echo(line(("ok", "green"), f"  wrote {counted(len(types), 'event type')} into {path}"))
    for one in types:
        if one.schema is not None and not one.examples:
            echo(line(("WARN", "yellow"), f"  {one.name} has no example: add a class method __examples__"))


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
        echo_json({"ok": not breaking, "is_current": is_current, "breaking": breaking})
        return Exit.FAILED if breaking else Exit.OK
    for change in breaking:
        echo(line(("FAIL", "bold red"), f"  {change}"))
    if not breaking:
        echo(
            line(
                ("ok", "green"),
                f"  {counted(len(types), 'event type')}: all changes are compatible with stored rows and readers",
            )
        )
    if not breaking and not is_current:
        echo(line(("WARN", "yellow"), f"  {path} is out of date: run --write {path}, and commit the file"))
    return Exit.FAILED if breaking else Exit.OK


async def _faults(stored: Outbox, classes: Mapping[str, type[AnyEvent]]) -> list[BreakingChange]:
    """Return the event types with undecodable rows among their newest rows. Values of rows are not quoted."""
    found: list[BreakingChange] = []
    for name, cls in sorted(classes.items()):
        search = Search(event_types=tuple(sorted(type_names(cls))))
        for database in databases(stored).values():
            rows = (await database.event_search.newest(stored.namespace, search, _ROWS)).rows
            faults = list(_undecodable(rows, cls))
            if faults:
                row, version, fault = faults[0]
                rows_at_fault = f"{len(faults)} of the newest {counted(len(rows), 'row')}"
                text = f"{rows_at_fault} cannot be decoded, such as {row.id} of version"
                fix = f"make version {version} readable: add a default or an upcaster"
                found.append(BreakingChange(name, field_in(fault) or None, f"{text} {version}: {fault}", fix))
    return found


def _undecodable(rows: Sequence[EventSummary], cls: type[AnyEvent]) -> Iterator[tuple[EventSummary, int, str]]:
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
        raise TargetError(f"{option}: cannot write {path}: {error.strerror}") from error
