"""``outboxio instances``, ``locks``, ``keys``, ``paused``, ``operations``: who does what in the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec import Struct
from rich import box
from rich.table import Table
from rich.text import Text

from outboxio.cli.answer import Exit, ago, line, moment, say, say_aside, say_json, state_of
from outboxio.cli.commands.operations import Manner
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.inside import admin_of, databases
from outboxio.cli.options import pasted
from outboxio.cli.target import TargetError
from outboxio.handlers.options import AnyPartitions
from outboxio.operations.arguments import given_partitions
from outboxio.operations.partitions.owners import HandlerPartitions, PartitionOwner, in_ranges
from outboxio.outbox import Outbox
from outboxio.support.text import briefly


async def paused(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print the names of the paused handlers."""
    names = sorted(await admin_of(outbox).paused())
    if as_json:
        say_json(names)
    elif names:
        for name in names:
            say(line((name, "bold"), " is paused; to end the pause:  ", pasted("unpause", name)))
    else:
        say(line(("ok", "green"), "  no handler is paused"))
    return Exit.FINE


async def operations(outbox: Outbox, limit: int, after: str | None, *, as_json: bool) -> Exit:
    """Print the newest orders of operators."""
    page = await admin_of(outbox).operations(limit, after)
    if as_json:
        say_json({"rows": list(page), "next": page.next})
        return Exit.FINE
    if not page:
        say(line(("no operator has given an order yet", "dim")))
        return Exit.FINE
    shown = Rows("id", "order", "state", Column("done", right=True), "by", "when (UTC)")
    for one in page:
        number = f"{one.done:,} of {one.matched:,}"
        told = ": ".join(filter(None, (one.reason, one.error)))
        shown.add(
            str(one.id), line(one.kind), state_of(one.state), number, line(f"{one.actor} ({one.origin})"),
            moment(one.created_date), below=line((told, "dim")),
        )  # fmt: skip
    say(shown)
    if page.next is not None:
        say_aside(line((f"to see older ones, add: --after {page.next}", "dim")))
    return Exit.FINE


async def keys(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print the parked keys, each with the commands that let the key go on."""
    found = await admin_of(outbox).keys()
    if as_json:
        say_json(found)
        return Exit.FINE
    if not found:
        say(line(("ok", "green"), "  no key is parked"))
        return Exit.FINE
    shown = Rows("handler", "key", "parked by", "since", Column("behind", right=True))
    for key in found:
        shown.add(
            line((key.handler_name, "bold")), line(key.ordering_key), str(key.notification_id), ago(key.since),
            f"{key.blocked:,}",
        )  # fmt: skip
    first = found[0]
    say(
        shown,
        "",
        line(("to run the parking notification again, or to go on without that notification:", "dim")),
    )
    say(
        line("  ", pasted("retry", str(first.notification_id))),
        line("  ", pasted("resume", first.handler_name, first.ordering_key)),
    )
    return Exit.FINE


# --- ``outboxio partitions`` ----------------------------------------------------------------------
#
# ``outboxio partitions``: who owns which partition of a handler, and how many partitions there are.


_PATIENCE = 3.0  # seconds: a running process takes a new partition within a second or two


class Request(Struct, frozen=True):
    """The words of the command line behind the target."""

    handler: str | None = None
    number: AnyPartitions | None = None


def request_of(words: Sequence[str]) -> Request:
    """The meaning of the words: ``[NAME [NUMBER]]``."""
    name, number = (*words, None, None)[:2]
    if number == "auto":
        return Request(name, "auto")
    if number is not None and not (number.isdecimal() and len(number) < 10):
        raise TargetError(
            f"{briefly(number)} is no number of partitions; expected auto, or a whole number from 1 to 64"
        )
    return Request(name, None if number is None else int(number))


async def partitions(outbox: Outbox, request: Request, manner: Manner) -> Exit:
    """Show the partitions of a handler, or of all handlers; with a number, set the number first."""
    for database in databases(outbox).values():
        await database.schema.check()
    name, number, admin = request.handler, request.number, admin_of(outbox)
    before = await admin.partitions(name) if number is not None else ()
    if number is not None and manner.dry_run:
        return _plan(outbox, before, given_partitions(number), manner)
    found = await admin.partitions(name, number, reason=manner.reason)
    if manner.as_json:
        say_json(found)
        return Exit.FINE
    for former, one in zip(before, found, strict=False):
        if former.number != one.number:
            say(line((one.handler_name, "bold"), f"{_where(outbox, one)}: {former.number} -> {one.number} partitions"))
        elif former.source != one.source:
            say(line((one.handler_name, "bold"), f"{_where(outbox, one)}: {one.number} partitions, {one.why}"))
    if number is not None:
        found = await _when_taken(outbox, request)
    say(_table(outbox, found))
    return Exit.FINE


def _plan(outbox: Outbox, before: Sequence[HandlerPartitions], number: AnyPartitions, manner: Manner) -> Exit:
    """Say what the order would change."""
    if number == "auto":
        names = ", ".join(f"{one.handler_name}{_where(outbox, one)}" for one in before)
        return manner.said(f"partitions would leave the number of partitions of {names} to outboxio")
    changes = [
        f"{one.handler_name}{_where(outbox, one)} from {one.number} to {number}"
        for one in before
        if one.number != number
    ]
    if not changes:
        return manner.said(f"the number of partitions is {number} already")
    return manner.said(f"partitions would set the number of partitions of {', '.join(changes)}")


async def _when_taken(outbox: Outbox, request: Request) -> Sequence[HandlerPartitions]:
    """The partitions as soon as running processes have taken all of them, or after 3 s."""
    until = time.monotonic() + _PATIENCE
    while True:
        found = await outbox.admin.partitions(request.handler)
        is_awaited = any(one.by_owner.keys() - {None} and None in one.by_owner for one in found)
        if not is_awaited or time.monotonic() > until:
            return found
        await asyncio.sleep(0.1)


def _table(outbox: Outbox, found: Sequence[HandlerPartitions]) -> Table:
    """A row for each handler name and process."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    table.add_column("handler", overflow="fold")
    table.add_column("of", justify="right")
    table.add_column("process", overflow="fold")
    table.add_column("partitions", overflow="fold", max_width=16)
    table.add_column("last taken (UTC)", no_wrap=True)
    table.add_column("number", overflow="fold")
    for one in found:
        beyond = Text(f" ({one.active} in use)", "dim") if one.active > one.number else Text()
        first = (line((one.handler_name, "bold"), _where(outbox, one)), Text(str(one.number)).append(beyond))
        why = "" if one.source is None else one.why
        for owned in _by_owner(one):
            owner = owned[0].owner
            process = line(owner) if owner is not None else Text("no process", "bold yellow")
            table.add_row(*first, process, in_ranges(each.partition for each in owned), _last_taken(owned), why)
            first, why = (Text(), Text()), ""
    return table


def _by_owner(one: HandlerPartitions) -> Sequence[Sequence[PartitionOwner]]:
    """The partitions of each process; partitions without an owner come last."""
    owned = [[each for each in one.owners if each.owner == owner] for owner in one.by_owner]
    return sorted(owned, key=lambda each: (each[0].owner is None, each[0].partition))


def _last_taken(owned: Sequence[PartitionOwner]) -> str:
    taken = max((each.since for each in owned if each.since is not None), default=None)
    return "" if taken is None else f"{taken:%Y-%m-%d %H:%M:%S}"


def _where(outbox: Outbox, one: HandlerPartitions) -> str:
    return f" on {one.shard}" if len(databases(outbox)) > 1 else ""
