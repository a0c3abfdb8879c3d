"""``outboxio instances``, ``locks``, ``keys``, ``paused``, ``operations``: who does what in the cluster."""

from __future__ import annotations

from outboxio.cli.answer import Exit, line, say, say_aside, say_json
from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.inside import admin_of
from outboxio.cli.pasting import command
from outboxio.cli.shown import ago, moment, state_of
from outboxio.outbox import Outbox


async def paused(outbox: Outbox, *, as_json: bool) -> Exit:
    """Print the names of the paused handlers."""
    names = sorted(await admin_of(outbox).paused())
    if as_json:
        say_json(names)
    elif names:
        for name in names:
            say(line((name, "bold"), " is paused; to end the pause:  ", command("unpause", name)))
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
        line("  ", command("retry", str(first.notification_id))),
        line("  ", command("resume", first.handler_name, first.ordering_key)),
    )
    return Exit.FINE
