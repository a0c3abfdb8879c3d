"""The command ``outboxio``: the groups of commands, and what they have in common."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outboxio import __version__
from outboxio.cli.arguments import changing, inspecting, running, tables
from outboxio.support.text import without_passwords


class Commands(TyperGroup):
    """The commands, in the order of their panels. Usage errors quote the input without passwords."""

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
        message: Any = getattr(error, "message", None)  # usage errors of typer and click
        if isinstance(message, str):
            vars(error)["message"] = without_passwords(message)
        raise


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success, 1 failure (a check failed, or work is left), 2 usage or configuration error, "
    "3 database unreachable, 4 partly done, 130 interrupted.",
)


@app.callback(invoke_without_command=True)
def outboxio(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    """Transactional outbox for asyncio: commit rows and events together, then handle every event."""
    if version:
        typer.echo(f"outboxio {__version__}")
        raise typer.Exit


for group in (tables, running, inspecting, changing):
    group.add_to(app)
