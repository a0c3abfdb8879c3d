"""Print the code, rows and runs of the demo. This module only formats."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from outboxio import Event, Operation, Unprocessable
from outboxio import Group as Failures

from .audit import Check, euros
from .domain import MoneyDeposited, MoneySent, ReceiptSent, WalletOpened
from .journal import Run

WIDEST = 100
CODE = 54  # columns


def title(console: Console, database: str, namespace: str) -> None:
    console.print()
    console.print(Text.assemble(("outboxio", "bold"), "  a wallet service, and the life of its events"))
    console.print(Text(f"on {database}, namespace {namespace}", "dim"))


def step(console: Console, number: int, headline: str) -> None:
    console.print()
    console.print(Text.assemble((f"{number}  ", "bold cyan"), (headline, "bold")))


def beside(console: Console, code: type | Callable[..., Any], outcome: Sequence[Text]) -> None:
    """Print the source of ``code`` with the outcome to its right."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=CODE)
    grid.add_column()
    source = Syntax(inspect.getsource(code).rstrip(), "python", theme="ansi_light", background_color="default")
    grid.add_row(source, Group(*outcome))
    _show(console, grid)


def committed(says: str, rows: Iterable[Any]) -> Text:
    types = ", ".join(row["event_type"] for row in rows)
    return Text.assemble(f"{says:<21}", (types, "cyan"))


def refused(says: str, error: Exception, rows: int) -> Text:
    return Text.assemble(f"{says:<21}", (f"refused: {rows} rows", "red"))


def ran(runs: Iterable[Run]) -> list[Text]:
    """Return a line per run, with the handler's name."""
    return [_ran(run, f"{run.handler:<13}") for run in runs]


def attempted(runs: Iterable[Run]) -> list[Text]:
    """Return a line per run of one handler, with the attempt."""
    return [_ran(run, f"try {run.attempt}  ") for run in runs]


def _ran(run: Run, who: str) -> Text:
    return Text.assemble(f"{run.seconds * 1000:3,.0f} ms  {who}", _described(run.event), "  ", _result(run))


def group(found: Failures) -> Text:
    return Text.assemble((f"{found.count} DEAD  ", "red"), found.sample.partition(": ")[2])


def operation(done: Operation) -> Text:
    return Text(f"{done.kind}: {done.matched} matched, {done.done} due again")


def checks(console: Console, results: Iterable[Check]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, show_header=False)
    for check in results:
        mark = Text("ok", "green") if check.holds else Text("NO", "bold red")
        table.add_row(mark, check.rule, Text(check.found, "dim" if check.holds else "red"))
    _show(console, table)


def farewell(console: Console, adds_up: bool, leaves_behind: str) -> None:
    conclusion = Text("It adds up.", "bold green") if adds_up else Text("It does not add up.", "bold red")
    console.print()
    _show(console, Text.assemble(conclusion, " ", (leaves_behind, "dim")))
    console.print()


def _described(event: Event) -> Text:
    """Summarise an event."""
    match event:
        case WalletOpened(wallet_id=wallet_id) | ReceiptSent(wallet_id=wallet_id):
            return Text(f"{wallet_id}", "cyan")
        case MoneySent(target=target, cents=cents):
            return Text(f"to {target} {euros(cents)}", "cyan")
        case MoneyDeposited(wallet_id=wallet_id, cents=cents):
            return Text(f"{wallet_id} {euros(cents)}", "cyan")
        case _:
            return Text(type(event).__name__, "cyan")


def _result(run: Run) -> Text:
    if run.error is None:
        return Text("ok", "green")
    return Text("DEAD", "red") if isinstance(run.error, Unprocessable) else Text(str(run.error), "yellow")


def _show(console: Console, renderable: RenderableType) -> None:
    """Print indented like the headings, and at most ``WIDEST`` columns wide."""
    console.print(Padding(renderable, (0, 0, 0, 3), expand=False), width=min(console.width, WIDEST))
