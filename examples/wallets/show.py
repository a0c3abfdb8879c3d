"""Prints the rows and runs of the demo for a reader. The other modules decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outboxio import Event, NotificationRecord

from .audit import Check, euros
from .domain import BonusPaid, MoneyDeposited, MoneyTransferred, WalletOpened
from .journal import Run

WIDEST = 100


def title(console: Console, database: str, namespace: str) -> None:
    console.print()
    console.print(Text.assemble(("outboxio", "bold"), "  a wallet service, and the life of its events"))
    console.print(Text(f"on {database}, namespace {namespace}", "dim"))


def step(console: Console, number: int, headline: str, explanation: str) -> None:
    console.print()
    console.print(Text.assemble((f"{number}  ", "bold cyan"), (headline, "bold")))
    console.print(Padding(Text(explanation, "dim"), (0, 0, 0, 3), expand=False), width=min(console.width, WIDEST))


class Committed:
    """The table of executed actions, and of the rows that each execution left in ``events``."""

    def __init__(self) -> None:
        self._table = _table("request", "action", "in events, in the same commit")

    def done(self, says: str, action: str, rows: Iterable[Any]) -> None:
        types = [row["event_type"] for row in rows]
        emitted = (
            Text(", ".join(filter(None, types)), "cyan") if any(types) else Text("no event: a sentinel row", "dim")
        )
        self._table.add_row(says, action, emitted)

    def refused(self, says: str, action: str, error: Exception, rows_before: int, rows_after: int) -> None:
        why = Text.assemble((f"refused, {error}", "red"), f"; {rows_before} rows before, {rows_after} after")
        self._table.add_row(says, action, why)

    def show(self, console: Console) -> None:
        _show(console, self._table)


def fanned_out(console: Console, records: Sequence[NotificationRecord]) -> None:
    """Show the number of notifications for each handler, by event type."""
    pairs: dict[tuple[str, str, str], int] = {}
    for record in records:
        key = (record.event_type, record.handler_name, record.state)
        pairs[key] = pairs.get(key, 0) + 1
    table = _table("event", "handler", "notifications", "state", right={"notifications"})
    for (event_type, handler, state), number in sorted(pairs.items()):
        table.add_row(Text(event_type, "cyan"), handler, str(number), _state(state))
    _show(console, table)


def ran(console: Console, runs: Iterable[Run]) -> None:
    table = _table("after", "handler", "event", "attempt", "result", right={"after", "attempt"})
    for run in runs:
        handler = Text(run.handler)
        if run.stored_as != run.handler:
            handler.append(f" (found as {run.stored_as})", "magenta")
        table.add_row(f"{run.seconds * 1000:,.0f} ms", handler, _told(run.event), str(run.attempt), _result(run))
    _show(console, table)


def wallets(console: Console, rows: Iterable[Any]) -> None:
    table = _table(
        "id", "owner", "balance", "ledger entries", "their sum", right={"balance", "ledger entries", "their sum"}
    )
    for row in rows:
        table.add_row(row["id"], row["owner"], euros(row["balance"]), str(row["entries"]), euros(int(row["booked"])))
    _show(console, table)


def events(console: Console, rows: Sequence[Any]) -> None:
    number_of = numbered(rows)
    table = _table("#", "action", "event", "model", "caused by", "delivered", right={"#", "caused by"})
    for row in rows:
        event_type, cause = row["event_type"], row["causation_id"]
        table.add_row(
            str(number_of[str(row["id"])]),
            row["action_name"],
            Text(event_type, "cyan") if event_type else Text("(sentinel)", "dim"),
            row["model_id"] or "",
            "" if cause is None else f"#{number_of[str(cause)]}",
            _delivered(event_type, row["delivered"]),
        )
    _show(console, table)


def notifications(console: Console, records: Iterable[NotificationRecord], rows: Sequence[Any]) -> None:
    number_of = numbered(rows)
    table = _table("event", "", "handler", "state", "attempts", "last error", right={"event", "attempts"})
    for record in sorted(records, key=lambda r: (r.sequence, r.handler_name)):
        error = record.errors[-1]["message"] if record.errors else ""
        table.add_row(
            f"#{number_of[str(record.event_id)]}",
            Text(record.event_type, "cyan"),
            record.handler_name,
            _state(record.state),
            Text(str(record.attempts), "yellow" if record.attempts > 1 else ""),
            Text(str(error), "dim"),
        )
    _show(console, table)


def proof(console: Console, checks: Iterable[Check]) -> None:
    table = _table("", "rule", "found")
    for check in checks:
        mark = Text("ok", "green") if check.holds else Text("NO", "bold red")
        table.add_row(mark, check.rule, Text(check.found, "" if check.holds else "red"))
    _show(console, table)


def farewell(console: Console, adds_up: bool, leaves_behind: str) -> None:
    verdict = Text("It adds up.", "bold green") if adds_up else Text("It does not add up.", "bold red")
    _show(console, Text.assemble(verdict, " ", (leaves_behind, "dim")))
    console.print()


def numbered(rows: Iterable[Any]) -> dict[str, int]:
    """Number the events' ids, because small numbers are easier to compare."""
    return {str(UUID(str(row["id"]))): number for number, row in enumerate(rows, 1)}


def _told(event: Event) -> Text:
    """Describe an event in a few words."""
    match event:
        case WalletOpened(wallet_id=wallet_id):
            details = wallet_id
        case MoneyTransferred(source=source, target=target, cents=cents):
            details = f"{source} to {target} {euros(cents)}"
        case MoneyDeposited(wallet_id=wallet_id, cents=cents) | BonusPaid(wallet_id=wallet_id, cents=cents):
            details = f"{wallet_id} {euros(cents)}"
        case _:
            details = ""
    return Text.assemble((type(event).__name__, "cyan"), f" {details}")


def _result(run: Run) -> Text:
    if run.error is not None:
        return Text(f"failed: {run.error}", "yellow")
    return Text("ok, at last" if run.attempt > 1 else "ok", "green")


def _state(state: str) -> Text:
    styles = {"SUCCEEDED": "green", "PENDING": "blue", "FAILED": "yellow"}
    return Text(str(state), styles.get(state, "red"))


def _delivered(event_type: str | None, delivered: object) -> Text:
    if event_type is None:
        return Text("never: nothing to deliver", "dim")
    return Text("yes", "green") if delivered else Text("waits for a handler", "yellow")


def _table(*headers: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left")
    return table


def _show(console: Console, renderable: RenderableType) -> None:
    """Print after an empty line, in the column of the headlines, and no wider than a page."""
    console.print()
    console.print(Padding(renderable, (0, 0, 0, 3), expand=False), width=min(console.width, WIDEST))
