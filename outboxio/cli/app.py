"""The command ``outboxio``: the groups of commands, and what all commands have in common."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outboxio import __version__
from outboxio.cli.lines import changing, looking, running, tables
from outboxio.support.text import without_passwords


class Commands(TyperGroup):
    """The commands, in the order of their panels. A usage error repeats the typed text without passwords."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _passwords_hidden():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _passwords_hidden():
            return super().invoke(ctx)


@contextmanager
def _passwords_hidden() -> Generator[None]:
    try:
        yield
    except Exception as error:
        told: Any = getattr(error, "message", None)  # usage errors of typer and click
        if isinstance(told, str):
            vars(error)["message"] = without_passwords(told)
        raise


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 the answer is no, 2 usage or configuration, 3 a database cannot be reached, "
    "4 only a part was done, 130 interrupted.",
)


@app.callback(invoke_without_command=True)
def outboxio(
    version: Annotated[bool, typer.Option("--version", help="Show the version, and exit.", is_eager=True)] = False,
) -> None:
    """The transactional outbox for asyncio: commit rows and events together, handle every event afterwards."""
    if version:
        typer.echo(f"outboxio {__version__}")
        raise typer.Exit


for lines in (tables, running, looking, changing):
    lines.add_to(app)
