"""``outboxio show``: an event, its notifications, and what the event has caused."""

from __future__ import annotations

from uuid import UUID

from msgspec import Struct
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from outboxio.cli.answer import Exit, json_of, line, say, say_error, say_json
from outboxio.cli.inside import admin_of, event_of
from outboxio.cli.shown import ago, moment, state_of
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.stored import EventTree, StoredEvent, TreeNode
from outboxio.operations.declared import counted
from outboxio.outbox import Outbox


class Parts(Struct, frozen=True):
    """What is shown beside the event and its notifications."""

    tree: bool
    payload: bool


async def show(outbox: Outbox, id: UUID, parts: Parts, *, as_json: bool) -> Exit:
    """Print the event with this id, or the event of the notification with this id."""
    admin = admin_of(outbox)
    records = await admin.inspect(id)
    is_notification = any(record.id == id for record in records)
    event_id = records[0].event_id if is_notification else id
    notifications = await admin.inspect(event_id) if is_notification else records
    event = await event_of(outbox, event_id)
    if event is None and not records:
        say_error(f"there is no event and no notification with the id {id}; retention may have removed it")
        if as_json:
            say_json({"event": None, "notifications": [], "tree": None})
        return Exit.NO
    tree = await admin.tree(event_id) if parts.tree else None
    if as_json:
        say_json({"event": event, "notifications": notifications, "tree": tree})
        return Exit.FINE
    if event is not None:
        _tell_event(event, payload=parts.payload)
    for record in notifications:
        _tell_notification(record)
    if tree is not None:
        say("", line(("caused by and causes", "dim")), _drawn(tree))
    return Exit.FINE


def _tell_event(event: StoredEvent, *, payload: bool) -> None:
    say(line((event.event_type or "(no event)", "bold"), f"  {event.id}"))
    facts = Table.grid(padding=(0, 2, 0, 0))
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
        say("", line(("payload", "dim")), Text(json_of(event.payload, indent=2)))
        say(line(("parameters of the action", "dim")), Text(json_of(event.action_params, indent=2)))


def _tell_notification(record: NotificationRecord) -> None:
    due = f", due {ago(record.next_retry_at)}" if record.state in ("PENDING", "FAILED", "DYING") else ""
    tries = "1 try" if record.attempts == 1 else f"{record.attempts} tries"
    told = f"  {tries}, changed {ago(record.updated_date)}{due}"
    say("", line((record.handler_name, "bold"), "  ").append(state_of(record.state)).append(line(told)))
    say(line((f"  {record.id}", "dim")))
    for error in record.errors:
        when = str(error.get("time", "")).replace("T", " ")[:19]
        say(line(f"  try {error.get('attempt')}  {when}  ", (f"{error.get('type')}: {error.get('message')}", "red")))
    if record.errors and (traceback := record.errors[-1].get("traceback")):
        for row in str(traceback).splitlines():
            say(line("    ", (row, "dim")))


def _drawn(tree: EventTree) -> Tree:
    """The tree of causation; the event that was asked for is bold."""

    def label(node: TreeNode) -> Text:
        style = "bold" if node.event.id == tree.event_id else "default"
        told = line((node.event.event_type or "(no event)", style), f"  {node.event.id}  ")
        states = [Text.assemble(f"{number:,} ", state_of(state)) for state, number in node.states.items()]
        return told.append(Text(", ").join(states))

    def add(branch: Tree, node: TreeNode) -> None:
        for child in node.children:
            add(branch.add(label(child)), child)

    drawn = Tree(label(tree.root))
    add(drawn, tree.root)
    if not tree.is_complete:
        drawn.add(Text(f"only {counted(tree.number, 'event')} are shown", "dim"))
    return drawn
