"""Tables that fit the terminal, and ``outboxio show``.

A narrow terminal leaves out less important columns. If the others are still too wide, each row becomes a few lines
with column names. Headers and cells are never broken, except in a column that folds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

from msgspec import Struct
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from outboxio.cli.internals import admin_of
from outboxio.cli.output import Exit, ago, echo, echo_error, echo_json, json_of, line, state_of, timestamp
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.operation import EventTree, StoredEvent, TreeNode
from outboxio.operations.declared import counted
from outboxio.outbox import Outbox

_GAP = 2
_MIN_FOLDED = 30  # minimum width of a column that folds


class Column(Struct, frozen=True):
    """A column of :class:`Rows`."""

    name: str
    right: bool = False
    """True to align right, as for numbers."""
    folds: bool = False
    """True for long texts."""
    spare: int = 0
    """The column with the highest number is left out first; 0 is always shown."""


class _Row(Struct, frozen=True):
    cells: Sequence[Text]
    below: Text | None


class Rows:
    """A table. Its first two columns identify a row."""

    def __init__(self, *columns: Column | str) -> None:
        self._columns = [column if isinstance(column, Column) else Column(column) for column in columns]
        self._rows: list[_Row] = []

    def add(self, *cells: Text | str, below: Text | None = None) -> None:
        """Add a row. ``below``: a text of any length to show under the row."""
        made = [cell if isinstance(cell, Text) else line(cell) for cell in cells]
        self._rows.append(_Row(made, below if below is not None and below.plain else None))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        chosen = self._fitting(options.max_width)
        if chosen is None:
            yield from self._as_lines(options.max_width)
        else:
            yield from self._as_table(chosen, console, options.max_width)

    # --- a table ---------------------------------------------------------------------------------

    def _fitting(self, width: int) -> list[int] | None:
        """Return the columns that fit, or ``None`` if the required columns do not fit."""
        chosen = list(range(len(self._columns)))
        while self._width(chosen) > width:
            spare = max(chosen, key=lambda index: self._columns[index].spare)
            if not self._columns[spare].spare:
                return None
            chosen.remove(spare)
        return chosen

    def _width(self, chosen: Sequence[int]) -> int:
        least = (min(self._natural(index), _MIN_FOLDED) if self._columns[index].folds else self._natural(index)
                 for index in chosen)  # fmt: skip
        return sum(least) + _GAP * (len(chosen) - 1)

    def _natural(self, index: int) -> int:
        return max([Text(self._columns[index].name).cell_len, *(row.cells[index].cell_len for row in self._rows)])

    def _as_table(self, chosen: Sequence[int], console: Console, width: int) -> Iterator[Text | Padding]:
        widths = {index: self._natural(index) for index in chosen}
        while (excess := sum(widths.values()) + _GAP * (len(chosen) - 1) - width) > 0:
            widest = max((index for index in chosen if self._columns[index].folds), key=lambda index: widths[index])
            widths[widest] -= min(excess, widths[widest] - _MIN_FOLDED)
        header = [Text(self._columns[index].name, "dim") for index in chosen]
        yield self._line(chosen, widths, header)
        yield Text("\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (sum(widths.values()) + _GAP * (len(chosen) - 1)), "dim")
        for row in self._rows:
            wrapped = [row.cells[index].wrap(console, widths[index], overflow="fold") for index in chosen]
            for number in range(max(map(len, wrapped))):
                parts = [each[number] if number < len(each) else Text("") for each in wrapped]
                yield self._line(chosen, widths, parts)
            if row.below is not None:
                yield Padding(row.below, (0, 0, 0, _GAP), expand=False)

    def _line(self, chosen: Sequence[int], widths: dict[int, int], parts: Sequence[Text]) -> Text:
        made = Text(no_wrap=True, end="\n")
        for position, (index, part) in enumerate(zip(chosen, parts, strict=True)):
            padding = " " * (widths[index] - part.cell_len)
            is_last = position == len(chosen) - 1
            made.append_text(Text.assemble(padding, part) if self._columns[index].right else part)
            if not is_last:
                made.append(("" if self._columns[index].right else padding) + " " * _GAP)
        made.rstrip()
        return made

    # --- a few lines for each row ----------------------------------------------------------------

    def _as_lines(self, width: int) -> Iterator[Text | Padding]:
        for row in self._rows:
            named, long = list[Text](), list[Text]()
            for column, cell in list(zip(self._columns, row.cells, strict=True))[2:]:
                if column.folds:
                    long.append(cell)
                elif cell.plain:
                    named.append(Text.assemble((f"{column.name} ", "dim"), cell))
            yield Text(" " * _GAP).join(row.cells[:2])
            for text in (*_packed(named, width - _GAP), *long, row.below or Text("")):
                if text.plain:
                    yield Padding(text, (0, 0, 0, _GAP), expand=False)


def _packed(parts: Sequence[Text], width: int) -> list[Text]:
    """Return lines of parts, without breaking a part that fits on a line."""
    lines = list[Text]()
    for part in parts:
        if lines and lines[-1].cell_len + _GAP + part.cell_len <= width:
            lines[-1] = Text(" " * _GAP).join([lines[-1], part])
        else:
            lines.append(part)
    return lines


# --- ``outboxio show``: an event, its notifications, and the events it has caused -----------------


async def show(outbox: Outbox, id: UUID, *, tree: bool, payload: bool, as_json: bool) -> Exit:
    """Print the event with this id, or the event of the notification with this id.

    ``tree``, ``payload``: also show the chain of causation, or the payload and parameters.
    """
    admin = admin_of(outbox)
    records = await admin.inspect(id)
    is_notification = any(record.id == id for record in records)
    event_id = records[0].event_id if is_notification else id
    notifications = await admin.inspect(event_id) if is_notification else records
    event = await admin.event(event_id)
    if event is None and not records:
        echo_error(f"no event or notification with id {id}; retention may have removed it")
        if as_json:
            echo_json({"event": None, "notifications": [], "reasons": {}, "tree": None})
        return Exit.FAILED
    chain = await admin.tree(event_id) if tree else None
    if as_json:
        echo_json({"event": event, "notifications": notifications, "reasons": notifications.reasons, "tree": chain})
        return Exit.OK
    if event is not None:
        _print_event(event, payload=payload)
    for record in notifications:
        _print_notification(record, notifications.reasons.get(record.id))
    if chain is not None:
        echo("", line(("caused by and causes", "dim")), _drawn(chain))
    return Exit.OK


def _print_event(event: StoredEvent, *, payload: bool) -> None:
    echo(line((event.event_type or "(no event)", "bold"), f"  {event.id}"))
    facts = Table.grid(padding=(0, 2, 0, 0))
    model = " ".join(filter(None, (event.model_type, event.model_id)))
    for name, value in {
        "model": model, "action": f"{event.action_name} {event.action_id}", "date (UTC)": timestamp(event.event_date),
        "key": event.ordering_key, "correlation": event.correlation_id,
        "caused by": event.causation_id, "available at": timestamp(event.available_at), "topic": event.topic,
        "shard": event.shard,
    }.items():  # fmt: skip
        if value:
            facts.add_row(Text(name, "dim"), line(str(value)))
    echo(facts)
    if payload:
        echo("", line(("payload", "dim")), Text(json_of(event.payload, indent=2)))
        echo(line(("parameters of the action", "dim")), Text(json_of(event.action_params, indent=2)))


def _print_notification(record: NotificationRecord, reason: str | None) -> None:
    due = f", due {ago(record.next_retry_at)}" if record.state in ("PENDING", "FAILED", "DYING") else ""
    attempts = "1 attempt" if record.attempts == 1 else f"{record.attempts} attempts"
    text = f"  {attempts}, changed {ago(record.updated_date)}{due}"
    echo("", line((record.handler_name, "bold"), "  ").append(state_of(record.state)).append(line(text)))
    echo(line((f"  {record.id}", "dim")))
    if reason is not None:
        echo(line("  ", (reason, "yellow")))
    for error in record.errors:
        when = str(error.get("time", "")).replace("T", " ")[:19]
        echo(
            line(f"  attempt {error.get('attempt')}  {when}  ", (f"{error.get('type')}: {error.get('message')}", "red"))
        )
    if record.errors and (traceback := record.errors[-1].get("traceback")):
        for row in str(traceback).splitlines():
            echo(line("    ", (row, "dim")))


def _drawn(tree: EventTree) -> Tree:
    """Return the tree of causation; the requested event is bold."""

    def label(node: TreeNode) -> Text:
        style = "bold" if node.event.id == tree.event_id else "default"
        text = line((node.event.event_type or "(no event)", style), f"  {node.event.id}  ")
        states = [Text.assemble(f"{number:,} ", state_of(state)) for state, number in node.states.items()]
        return text.append(Text(", ").join(states))

    def add(branch: Tree, node: TreeNode) -> None:
        for child in node.children:
            add(branch.add(label(child)), child)

    drawn = Tree(label(tree.root))
    add(drawn, tree.root)
    if not tree.is_complete:
        drawn.add(Text(f"only the first {counted(tree.number, 'event')} are shown", "dim"))
    return drawn
