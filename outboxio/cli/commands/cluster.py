"""``outboxio keys``, ``paused``, ``operations`` and ``partitions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec import Struct
from rich import box
from rich.table import Table
from rich.text import Text

from outboxio.cli.commands.operations import OutputFormat
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.internals import admin_of, databases
from outboxio.cli.options import pasted
from outboxio.cli.output import Exit, ago, echo, echo_json, echo_stderr, line, state_of, timestamp
from outboxio.cli.target import TargetError
from outboxio.handlers.options import AnyPartitions
from outboxio.operations.arguments import partitions_argument
from outboxio.operations.partitions.owners import HandlerPartitions, PartitionOwner, in_ranges
from outboxio.outbox import Outbox
from outboxio.support.text import briefly


async def paused(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print the names of the paused handlers."""
    names = sorted(await admin_of(outbox).paused())
    if as_json:
        echo_json(names)
    elif names:
        for name in names:
            echo(line((name, "bold"), " is paused; to resume it:  ", pasted("unpause", name)))
    else:
        echo(line(("ok", "green"), "  no handler is paused"))
    return Exit.OK


async def operations(outbox: Outbox, limit: int, after: str | None, *, as_json: bool) -> Exit:
    """Print the newest operations."""
    page = await admin_of(outbox).operations(limit, after)
    if as_json:
        echo_json({"rows": list(page), "next": page.next})
        return Exit.OK
    if not page:
        echo(line(("no operations yet", "dim")))
        return Exit.OK
    shown = Rows("id", "operation", "state", Column("done", right=True), "by", "when (UTC)")
    for one in page:
        number = f"{one.done:,} of {one.matched:,}"
        details = ": ".join(filter(None, (one.reason, one.error)))
        shown.add(
            str(one.id), line(one.kind), state_of(one.state), number, line(f"{one.actor} ({one.origin})"),
            timestamp(one.created_date), below=line((details, "dim")),
        )  # fmt: skip
    echo(shown)
    if page.next is not None:
        echo_stderr(line((f"to see older ones, add: --after {page.next}", "dim")))
    return Exit.OK


async def keys(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print the parked keys, and the commands to resume them."""
    found = await admin_of(outbox).keys()
    if as_json:
        echo_json(found)
        return Exit.OK
    if not found:
        echo(line(("ok", "green"), "  no key is parked"))
        return Exit.OK
    shown = Rows("handler", "key", "parked by", "since", Column("behind", right=True))
    for key in found:
        shown.add(
            line((key.handler_name, "bold")), line(key.ordering_key), str(key.notification_id), ago(key.since),
            f"{key.blocked:,}",
        )  # fmt: skip
    first = found[0]
    echo(
        shown,
        "",
        line(("to run the dead letter again, or to skip it and resume the key:", "dim")),
    )
    echo(
        line("  ", pasted("retry", str(first.notification_id))),
        line("  ", pasted("resume", first.handler_name, first.ordering_key)),
    )
    return Exit.OK


# --- ``outboxio partitions`` ----------------------------------------------------------------------
#
# Which process owns which partition of a handler, and how many partitions there are.


_TAKE_TIMEOUT = 3.0  # seconds: a running process takes a new partition within a second or two


class PartitionRequest(Struct, frozen=True):
    """The arguments after the target."""

    handler: str | None = None
    number: AnyPartitions | None = None


def request_of(arguments: Sequence[str]) -> PartitionRequest:
    """Parse the arguments ``[NAME [NUMBER]]``."""
    name, number = (*arguments, None, None)[:2]
    if number == "auto":
        return PartitionRequest(name, "auto")
    if number is not None and not (number.isdecimal() and len(number) < 10):
        raise TargetError(
            f"invalid number of partitions {briefly(number)}; expected auto, or a whole number from 1 to 64"
        )
    return PartitionRequest(name, None if number is None else int(number))


async def partitions(outbox: Outbox, request: PartitionRequest, output: OutputFormat) -> Exit:
    """Show the partitions of a handler, or of all handlers. With a number, set it first."""
    for database in databases(outbox).values():
        await database.schema.check()
    name, number, admin = request.handler, request.number, admin_of(outbox)
    before = await admin.partitions(name) if number is not None else ()
    if number is not None and output.dry_run:
        return _plan(outbox, before, partitions_argument(number), output)
    found = await admin.partitions(name, number, reason=output.reason)
    if output.as_json:
        echo_json(found)
        return Exit.OK
    for former, one in zip(before, found, strict=False):
        if former.number != one.number:
            echo(line((one.handler_name, "bold"), f"{_where(outbox, one)}: {former.number} -> {one.number} partitions"))
        elif former.source != one.source:
            echo(line((one.handler_name, "bold"), f"{_where(outbox, one)}: {one.number} partitions, {one.why}"))
    if number is not None:
        found = await _when_taken(outbox, request)
    echo(_table(outbox, found))
    return Exit.OK


def _plan(outbox: Outbox, before: Sequence[HandlerPartitions], number: AnyPartitions, output: OutputFormat) -> Exit:
    """Print what the operation would change."""
    if number == "auto":
        names = ", ".join(f"{one.handler_name}{_where(outbox, one)}" for one in before)
        return output.printed(f"would let outboxio choose the number of partitions of {names}")
    changes = [
        f"{one.handler_name}{_where(outbox, one)} from {one.number} to {number}"
        for one in before
        if one.number != number
    ]
    if not changes:
        return output.printed(f"the number of partitions is already {number}")
    return output.printed(f"would change the number of partitions of {', '.join(changes)}")


async def _when_taken(outbox: Outbox, request: PartitionRequest) -> Sequence[HandlerPartitions]:
    """Return the partitions when running processes have taken all of them, or after 3 s."""
    until = time.monotonic() + _TAKE_TIMEOUT
    while True:
        found = await outbox.admin.partitions(request.handler)
        is_awaited = any(one.by_owner.keys() - {None} and None in one.by_owner for one in found)
        if not is_awaited or time.monotonic() > until:
            return found
        await asyncio.sleep(0.1)


def _table(outbox: Outbox, found: Sequence[HandlerPartitions]) -> Table:
    """Return a table with a row for each handler name and process."""
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
    """Return the partitions of each process. Those without an owner come last."""
    owned = [[each for each in one.owners if each.owner == owner] for owner in one.by_owner]
    return sorted(owned, key=lambda each: (each[0].owner is None, each[0].partition))


def _last_taken(owned: Sequence[PartitionOwner]) -> str:
    taken = max((each.since for each in owned if each.since is not None), default=None)
    return "" if taken is None else f"{taken:%Y-%m-%d %H:%M:%S}"


def _where(outbox: Outbox, one: HandlerPartitions) -> str:
    return f" on {one.shard}" if len(databases(outbox)) > 1 else ""
