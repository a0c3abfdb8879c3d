"""The output of a command: text for people, JSON for programs, an exit code for scripts."""

from __future__ import annotations

import asyncio
import contextvars
import getpass
import re
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Any, cast

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from outboxio.cli.options import with_outbox
from outboxio.cli.target import TargetError
from outboxio.errors import ConfigurationError, DatabaseUnavailable, OutboxError
from outboxio.model.notification import NotificationRecord, State
from outboxio.support.codec import is_list, is_object
from outboxio.support.text import visible, visible_json, without_passwords

_DEFAULT_WIDTH = 100
_SCHEMA_COMMANDS = re.compile("`(outboxio (?:migrate|check))`")  # commands quoted in errors about tables


class Exit(IntEnum):
    """The exit codes."""

    OK = 0
    FAILED = 1
    """A check failed, or work is left."""
    USAGE = 2
    UNREACHABLE = 3
    PARTIAL = 4
    """The operation was only partly carried out."""


def run_command(
    work: Callable[[], Coroutine[Any, Any, Exit]],
    *,
    as_json: bool = False,
    verbose: bool = False,
    report: Callable[[str, Exception], None] | None = None,
) -> None:
    """Run a command and exit with its code. An error is printed on one line; with ``verbose``, with a traceback.

    ``report`` receives the text of that line and the error; by default the line goes to stderr.
    """
    context = contextvars.copy_context()  # remembers how the command line names the outbox
    try:
        with asyncio.Runner() as runner:
            code: int = runner.run(work(), context=context)
    except (KeyboardInterrupt, typer.Abort):  # an interrupted prompt raises Abort
        code = 130  # 128 + SIGINT, as in a shell
    except Exception as error:
        if verbose:
            # A traceback quotes source lines, which may contain a URL with a password.
            text = without_passwords("".join(traceback.format_exception(error)))
            sys.stderr.write("\n".join(map(visible, text.split("\n"))))
        code = context.run(report_error, error, as_json=as_json, report=report)
    raise typer.Exit(code)


def report_error(error: Exception, *, as_json: bool, report: Callable[[str, Exception], None] | None = None) -> Exit:
    """Print the error, and return the exit code."""
    leaves = list(_leaves(error))
    text = "; ".join(map(error_text, leaves))
    if report is None:
        echo_error(text)
    else:
        report(text, leaves[0])
    if as_json:
        echo_json({"error": {"type": type(leaves[0]).__name__, "message": without_passwords(str(leaves[0]))}})
    return exit_code(leaves[0])


def exit_code(error: Exception) -> Exit:
    """Return the exit code for an error."""
    if isinstance(error, ConfigurationError):
        return Exit.USAGE
    if isinstance(error, DatabaseUnavailable):
        return Exit.UNREACHABLE
    return Exit.FAILED


def error_text(error: Exception) -> str:
    """Return an error as one line, without passwords. Errors that are not outboxio's own include their type."""
    text = without_passwords(" ".join(str(error).split()))
    return text if isinstance(error, OutboxError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def echo(*lines: RenderableType) -> None:
    """Print to stdout, for people. A ``str`` is treated as markup, so text with names must be a :func:`line`."""
    _print(_console(), lines)


def echo_stderr(*lines: RenderableType) -> None:
    """Print to stderr, for people: progress and hints, which are not part of the output."""
    _print(_console(stderr=True), lines)


def echo_error(text: str) -> None:
    """Print one line to stderr. Commands that it quotes get the arguments that name the outbox."""
    message = _SCHEMA_COMMANDS.sub(lambda found: f"`{with_outbox(found[1])}`", text)
    _print(_console(stderr=True), (line(("error:", "bold red"), " ", message),))


def echo_json(value: object) -> None:
    """Print a JSON document to stdout."""
    sys.stdout.write(f"{json_of(value, indent=2)}\n")


def json_of(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON, on one line unless ``indent`` is set. Terminal control characters are escaped."""
    encoded = msgspec.json.encode(value)
    return visible_json((encoded if indent is None else msgspec.json.format(encoded, indent=indent)).decode())


def line(*parts: str | tuple[str, str]) -> Text:
    """Return a line for the terminal. Each part is a text, or a pair of text and style.

    Parts are not markup, so brackets in names are shown as they are. Control characters are escaped.
    """
    return Text.assemble(*(visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts))


def indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 2), expand=False)


def terminal() -> Console:
    """Return the console of stdout: as wide as the terminal, or 100 columns without one."""
    return _console()


def _print(console: Console, lines: tuple[RenderableType, ...]) -> None:
    for each in lines:
        console.print(each, soft_wrap=isinstance(each, str | Text))


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _DEFAULT_WIDTH
    return console


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for each in cast("ExceptionGroup[Exception]", error).exceptions:
            yield from _leaves(each)
    else:
        yield error


# --- formatting of values -------------------------------------------------------------------------


COLOURS: Mapping[str, str] = {
    State.DEAD: "bold red",
    State.EXPIRED: "red",
    State.DYING: "red",
    State.FAILED: "yellow",
    State.BLOCKED: "yellow",
    State.SUCCEEDED: "green",
}

_SECOND, _MINUTE, _HOUR, _DAY = 1, 60, 3600, 86400


def state_of(state: str) -> Text:
    """Return a state in its colour."""
    return line((str(state), COLOURS.get(state, "default")))


def ago(time: datetime | None, now: datetime | None = None) -> str:
    """Return how long ago a time (naive UTC) was: ``14 min ago``; the empty text for ``None``."""
    if time is None:
        return ""
    seconds = ((now or datetime.now(UTC).replace(tzinfo=None)) - time).total_seconds()
    return f"in {span(-seconds)}" if seconds < 0 else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """Return a duration in its largest unit: ``40 ms``, ``0.4 s``, ``14 min``, ``3 h``, ``2 d``."""
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit or (unit == _DAY and seconds >= unit):
            return f"{seconds / unit:.0f} {name}"
    if seconds < 0.1 * _SECOND:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds >= 10 * _SECOND else f"{seconds:.1f} s"


def timestamp(time: datetime | None) -> str:
    """Return a time (naive UTC) to the second."""
    return "" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"


def last_error(record: NotificationRecord) -> str:
    """Return the last error of a notification as ``TypeName: message``; the empty text without one or after a success.

    Errors in another format, written by other tools, are shown as they are.
    """
    if not record.errors or record.state is State.SUCCEEDED:
        return ""
    errors: object = record.errors
    last = errors[-1] if is_list(errors) else errors
    if not is_object(last):
        return str(last)
    return f"{last.get('type')}: {last.get('message')}".removesuffix(": ").removesuffix(": None")


def echo_json_lines(values: Iterable[Any]) -> None:
    """Print one JSON object per line to stdout (NDJSON)."""
    for value in values:
        sys.stdout.write(f"{json_of(value)}\n")
    sys.stdout.flush()


def shortened(text: str, longest: int = 100) -> str:
    """Return the start of a text, on one line."""
    plain = " ".join(text.split())
    return plain if len(plain) <= longest else plain[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def duration(time: timedelta) -> str:
    return span(time.total_seconds())


# --- confirmation and progress of operations, on stderr -------------------------------------------


Report = Callable[[int, int], None]
"""Called with the number of notifications that are done, and the total."""


def actor() -> str:
    """Return who runs the operation, as ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for the user id
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:255]


def confirm(question: str, *, yes: bool, typed: str | None = None) -> bool:
    """Ask whether to carry out an operation. Return True if the user agrees, or if ``yes`` is set.

    ``typed``: the text that the user has to type, for an operation that cannot be undone. Raises
    :class:`TargetError` without a terminal.
    """
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise TargetError(
            f"{question} Cannot ask for confirmation without a terminal; use --yes, or --dry-run for a preview"
        )
    if typed is not None:
        answer: str = typer.prompt(
            visible(f"{question} Type {typed} to confirm"), default="", show_default=False, err=True
        )
        return answer.strip() == typed
    return typer.confirm(visible(question), default=False, err=True)


@contextmanager
def progress(what: str) -> Generator[Report]:
    """Show a progress bar, if stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report
