"""Questions before an order that changes much, and the progress of an order: on stderr, apart from the answer."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outboxio.cli.target import TargetError
from outboxio.support.text import visible

Report = Callable[[int, int], None]
"""Takes the number of notifications that are done, and the number of all."""


def actor() -> str:
    """Who gives the order: the user of this machine, and the machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for the user's number
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:255]


def ask(question: str, *, yes: bool, typed: str | None = None) -> bool:
    """True if the order is to be carried out.

    ``yes``: no question. ``typed``: the answer has to be this text, for an order that cannot be taken back. Without
    a terminal no person can answer, so the order is refused: :class:`TargetError`.
    """
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise TargetError(
            f"{question} There is no terminal to answer at: add --yes to carry it out, or --dry-run to only look"
        )
    if typed is not None:
        answer: str = typer.prompt(
            visible(f"{question} Type {typed} to go on"), default="", show_default=False, err=True
        )
        return answer.strip() == typed
    return typer.confirm(visible(question), default=False, err=True)


@contextmanager
def progress(what: str) -> Generator[Report]:
    """A bar on a terminal; nothing without a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report
