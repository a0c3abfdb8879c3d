"""``outboxio list``, ``dead``, ``show``, ``events``, ``tail``, ``export``: notifications and events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import msgspec
from msgspec import Struct
from rich.text import Text
from rich.tree import Tree

from outboxio.cli.answer import Exit, line, say, say_aside, say_error, say_json
from outboxio.cli.choice import Choice
from outboxio.cli.inside import admin_of
from outboxio.cli.shown import ago, document, last_error, moment, say_lines, shortened, state_of, table
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.group import Group
from outboxio.model.operating.page import Page
from outboxio.model.operating.stored_event import EventTree, StoredEvent, TreeNode
from outboxio.outbox import Outbox

_LOOKS = 200  # changed notifications that one look of ``tail`` reads


class Paging(Struct, frozen=True):
    """Which part of a list to show."""

    limit: int
    after: str | None


async def list_notifications(outbox: Outbox, choice: Choice, paging: Paging, *, as_json: bool) -> Exit:
    """Print the newest notifications that match."""
    page = await admin_of(outbox).list(choice.filter(), paging.limit, paging.after)
    if as_json:
        say_json({"rows": list(page), "next": page.next})
        return Exit.FINE
    if not page:
        say(line(("nothing matches", "dim")))
    else:
        shown = table("id", "state", "handler", "event", "changed", "tries", "last error", right=["tries"])
        for record in page:
            event = record.event_type + (f" {record.model_id}" if record.model_id is not None else "")
            shown.add_row(
                Text(str(record.id)), state_of(record.state), line(record.handler_name), line(event),
                ago(record.updated_date), str(record.attempts), line(shortened(last_error(record))),
            )  # fmt: skip
        say(shown)
    _tell_next(page.next)
    return Exit.FINE


async def events(outbox: Outbox, choice: Choice, paging: Paging, *, as_json: bool) -> Exit:
    """Print the newest events that match."""
    page: Page[StoredEvent] = await admin_of(outbox).events(choice.filter(), paging.limit, paging.after)
    if as_json:
        say_json({"rows": list(page), "next": page.next})
        return Exit.FINE
    if not page:
        say(line(("nothing matches", "dim")))
    else:
        shown = table("id", "type", "model", "action", "date (UTC)", "fanned out")
        for event in page:
            model = " ".join(filter(None, (event.model_type, event.model_id)))
            fanned_out = Text("yes", "dim") if event.is_delivered else Text("not yet", "yellow")
            shown.add_row(
                Text(str(event.id)), line(event.event_type or "(no event)"), line(model), line(event.action_name),
                moment(event.event_date), fanned_out,
            )  # fmt: skip
        say(shown)
    _tell_next(page.next)
    return Exit.FINE


async def dead(outbox: Outbox, choice: Choice, by: str, *, as_json: bool) -> Exit:
    """Print the failures in groups, each with the command that retries the group."""
    groups = await admin_of(outbox).groups(choice.filter("DEAD", "EXPIRED"))
    if as_json:
        say_json({"scope": str(groups), "looked_at": groups.looked_at, "of": int(groups.of), "groups": list(groups)})
        return Exit.FINE
    if not groups:
        say(line(("ok", "green"), "  no dead letters match"))
        return Exit.FINE
    say(line((str(groups), "dim")), "")
    shown = table("number", "handler", "error", "last seen", right=["number"])
    for group in _regrouped(groups, by):
        shown.add_row(
            f"{group.number:,}", line((group.handler_name, "bold")), line(group.fingerprint), ago(group.last_seen)
        )
    say(shown, "", line(("to retry a group:", "dim")))
    for group in groups[:3]:
        say(line("  ", retry_command(group)))
    return Exit.FINE


def retry_command(group: Group) -> str:
    """The command that retries the notifications of a group."""
    error = group.fingerprint.replace("'", "'\\''")
    return f"outboxio retry --state DEAD --handler {group.handler_name} --error '{error}'"


async def show(outbox: Outbox, id: UUID, *, tree: bool, payload: bool, as_json: bool) -> Exit:
    """Print an event, its notifications with their errors, and with ``tree`` what the event has caused."""
    admin = admin_of(outbox)
    records = await admin.inspect(id)
    event_id = records[0].event_id if records else id
    found = await admin.tree(event_id)
    if found is None and not records:
        say_error(f"there is no event and no notification with the id {id}")
        return Exit.NO
    event = next((node.event for node in found.root if node.event.id == event_id), None) if found is not None else None
    notifications = records if len(records) != 1 or event is None else await admin.inspect(event_id)
    if as_json:
        say_json({"event": event, "notifications": notifications, "tree": found if tree else None})
        return Exit.FINE
    if event is not None:
        _tell_event(event, payload=payload)
    for record in notifications:
        _tell_notification(record)
    if tree and found is not None:
        say("", _drawn(found))
    return Exit.FINE


async def export(outbox: Outbox, choice: Choice, file: Path | None) -> Exit:
    """Write all notifications that match, one JSON object on each line, redacted."""
    filter, number = choice.filter("DEAD", "EXPIRED"), 0
    if file is None:
        async for record in admin_of(outbox).export(filter):
            say_lines([record])
        return Exit.FINE
    with file.open("xb") as written:
        async for record in admin_of(outbox).export(filter):
            written.write(msgspec.json.encode(record) + b"\n")
            number += 1
    say_aside(line(("ok", "green"), f"  wrote {number:,} notifications into {file}"))
    return Exit.FINE


async def tail(outbox: Outbox, choice: Choice, *, follow: bool, every: float, as_json: bool) -> Exit:
    """Print notifications as they change, the oldest change first; with ``follow``, until a signal comes."""
    seen: dict[UUID, object] = {}
    since = choice.filter().since
    while True:
        wanted = choice.filter()
        page = await admin_of(outbox).list(msgspec.structs.replace(wanted, since=since), _LOOKS)
        fresh = [record for record in reversed(page) if seen.get(record.id) != (record.state, record.updated_date)]
        for record in sorted(fresh, key=lambda record: record.updated_date):
            seen[record.id] = (record.state, record.updated_date)
            _tell_change(record, as_json=as_json)
        if not follow:
            return Exit.FINE
        if fresh:
            since = max(record.updated_date for record in fresh) - timedelta(seconds=5)  # clocks differ
            seen = {id: at for id, at in seen.items() if any(id == record.id for record in page)}
        await asyncio.sleep(every)


# --- in words ------------------------------------------------------------------------------------


def _tell_next(next: str | None) -> None:
    if next is not None:
        say_aside(line((f"older ones: --after {next}", "dim")))


def _regrouped(groups: Sequence[Group], by: str) -> Sequence[Group]:
    """The groups by error, or added up by handler."""
    if by == "error":
        return groups
    added: dict[str, Group] = {}
    for group in groups:
        former = added.get(group.handler_name)
        added[group.handler_name] = msgspec.structs.replace(
            group,
            fingerprint="" if former is not None else group.fingerprint,
            number=group.number + (former.number if former else 0),
            last_seen=max(group.last_seen, former.last_seen) if former else group.last_seen,
        )
    return list(added.values())


def _tell_event(event: StoredEvent, *, payload: bool) -> None:
    say(line((event.event_type or "(no event)", "bold"), f"  {event.id}"))
    facts = table("", "")
    facts.show_header = False
    model = " ".join(filter(None, (event.model_type, event.model_id)))
    for name, value in {
        "model": model, "action": f"{event.action_name} {event.action_id}", "date (UTC)": moment(event.event_date),
        "key": event.ordering_key, "correlation": event.correlation_id,
        "caused by": event.causation_id, "available at": moment(event.available_at), "topic": event.topic,
        "shard": event.shard,
    }.items():  # fmt: skip
        if value:
            facts.add_row(Text(name, "dim"), line(str(value)))
    say(facts)
    if payload:
        say(line(("payload", "dim")), Text(document(event.payload)), line(("parameters of the action", "dim")))
        say(Text(document(event.action_params)))


def _tell_notification(record: NotificationRecord) -> None:
    due = f", due {ago(record.next_retry_at)}" if record.state in ("PENDING", "FAILED", "DYING") else ""
    told = f"  {record.attempts} tries, changed {ago(record.updated_date)}{due}  {record.id}"
    say("", line((record.handler_name, "bold"), "  ").append(state_of(record.state)).append(line(told)))
    for error in record.errors:
        say(
            line(
                f"  try {error.get('attempt')} at {error.get('time')}  ",
                (f"{error.get('type')}: {error.get('message')}", "red"),
            )
        )
    if record.errors and (traceback := record.errors[-1].get("traceback")):
        for row in str(traceback).splitlines():
            say(line("    ", (row, "dim")))


def _tell_change(record: NotificationRecord, *, as_json: bool) -> None:
    if as_json:
        say_lines([record])
        return
    told = f"  {record.handler_name}  {record.event_type} {record.event_id}  {shortened(last_error(record))}"
    say(line(moment(record.updated_date), "  ").append(state_of(f"{record.state:<9}")).append(line(told)))


def _drawn(tree: EventTree) -> Tree:
    """The tree of causation; the event that was asked for is bold."""

    def label(node: TreeNode) -> Text:
        style = "bold" if node.event.id == tree.event_id else "default"
        told = line((node.event.event_type or "(no event)", style), f"  {node.event.id}  ")
        states = [Text.assemble(f"{number} ", state_of(state), " ") for state, number in node.states.items()]
        return Text.assemble(told, *states)

    def add(branch: Tree, node: TreeNode) -> None:
        for child in node.children:
            add(branch.add(label(child)), child)

    drawn = Tree(label(tree.root))
    add(drawn, tree.root)
    if not tree.is_complete:
        drawn.add(Text(f"only {tree.number} events are shown", "dim"))
    return drawn
