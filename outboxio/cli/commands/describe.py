"""``outboxio describe``: the handlers and settings in your code, without a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict
from rich import box
from rich.table import Table
from rich.text import Text

from outboxio.cli.internals import databases, handlers
from outboxio.cli.output import Exit, echo, echo_json, indented, line
from outboxio.handlers.described import DEFAULT_OPTIONS, changed
from outboxio.handlers.handler import Handler
from outboxio.model.event import Event, is_event_class, type_name, with_subclasses
from outboxio.outbox import Outbox
from outboxio.settings import Settings


class OutboxDescription(Struct, frozen=True):
    """An outbox, as the code configures it."""

    namespace: str
    shards: dict[str, str]
    """The dialect of each shard."""
    handlers: Sequence[Handler]
    settings: dict[str, Any]
    """The settings that are not the defaults."""
    unhandled: Sequence[str]
    """The event types in the code without a handler in this outbox."""


def describe(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print the description."""
    found = description_of(outbox)
    if as_json:
        echo_json({**asdict(found), "handlers": [_described(handler) for handler in found.handlers]})
    else:
        _print(found)
    return Exit.OK


def description_of(outbox: Outbox) -> OutboxDescription:
    registered = handlers(outbox)
    handled = {cls for handler in registered for cls in handler.accepts()}
    defined = {cls for cls in with_subclasses(Event) if is_event_class(cls) and cls is not Event}
    return OutboxDescription(
        outbox.namespace,
        {name: database.dialect for name, database in databases(outbox).items()},
        sorted(registered, key=lambda handler: handler.name),
        changed(outbox.settings, Settings()),
        sorted(map(type_name, defined - handled)),
    )


def _described(handler: Handler) -> dict[str, Any]:
    """Return a handler as registered in code. ``options``: those that differ from the defaults."""
    return {
        "name": handler.name, "where": handler.where, "aliases": sorted(handler.aliases),
        "event_types": handler.event_type_names, "topic": handler.topic,
        "options": changed(handler.options, DEFAULT_OPTIONS),
    }  # fmt: skip


def _print(found: OutboxDescription) -> None:
    shards = ", ".join(f"{name} ({dialect})" for name, dialect in found.shards.items())
    echo("", line("namespace ", (found.namespace, "bold"), f" on {shards}"), "")
    if found.handlers:
        echo(_table(found.handlers), "")
    else:
        echo(
            line(
                (
                    "no handlers are registered; import the modules that register them in the module of the outbox",
                    "yellow",
                )
            )
        )
    if found.settings:
        echo(line("non-default settings"))
        echo(indented(_grid(found.settings)), "")
    if found.unhandled:
        names = ", ".join(found.unhandled)
        echo(line(("WARN", "yellow"), f"  no handler here for {names}; another process may have one"))


def _table(registered: Sequence[Handler]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for column in ("handler", "events", "non-default options"):
        table.add_column(column, overflow="fold")
    for one in registered:
        aliases = sorted(one.aliases)
        name = line((one.name, "bold"), *((f"\nalso {', '.join(aliases)}", "dim") for _ in aliases[:1]))
        wants = f"topic {one.topic}" if one.topic is not None else ", ".join(one.event_type_names)
        options = "\n".join(f"{option}={value}" for option, value in changed(one.options, DEFAULT_OPTIONS).items())
        table.add_row(Text.assemble(name), line(wants), line(options))
    return table


def _grid(values: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(line(name), line(str(value)))
    return table
