"""The answer of a command: text for people, JSON for machines, an exit code for scripts."""

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

_WIDTH_OF_A_PAGE = 100
_OF_TABLES = re.compile("`(outboxio (?:migrate|check))`")  # commands that an error about tables names


class Exit(IntEnum):
    """The exit codes."""

    FINE = 0
    NO = 1
    """The answer is no: a check failed, work is left."""
    USAGE = 2
    UNREACHABLE = 3
    PARTLY = 4
    """A part of the order was not carried out."""


def answer(
    work: Callable[[], Coroutine[Any, Any, Exit]],
    *,
    as_json: bool = False,
    verbose: bool = False,
    report: Callable[[str, Exception], None] | None = None,
) -> None:
    """Run a command, and exit with the code. An error is a single line; with ``verbose``, a traceback too.

    ``report`` writes that line, given the text and the error; by default the line goes to stderr.
    """
    context = contextvars.copy_context()  # of the command, which has the words of the command line
    try:
        with asyncio.Runner() as runner:
            code: int = runner.run(work(), context=context)
    except (KeyboardInterrupt, typer.Abort):  # an interrupted question is an Abort
        code = 130  # 128 + SIGINT, as in a shell
    except Exception as error:
        if verbose:
            # The traceback shows lines of source, which may have a URL with a password.
            text = without_passwords("".join(traceback.format_exception(error)))
            sys.stderr.write("\n".join(map(visible, text.split("\n"))))
        code = context.run(refuse, error, as_json=as_json, report=report)
    raise typer.Exit(code)


def refuse(error: Exception, *, as_json: bool, report: Callable[[str, Exception], None] | None = None) -> Exit:
    """Print the error; the exit code."""
    leaves = list(_leaves(error))
    text = "; ".join(map(in_words, leaves))
    if report is None:
        say_error(text)
    else:
        report(text, leaves[0])
    if as_json:
        say_json({"error": {"type": type(leaves[0]).__name__, "message": without_passwords(str(leaves[0]))}})
    return exit_code(leaves[0])


def exit_code(error: Exception) -> Exit:
    """The exit code of an error: a mistake of the operator, an unreachable database, or neither."""
    if isinstance(error, ConfigurationError):
        return Exit.USAGE
    if isinstance(error, DatabaseUnavailable):
        return Exit.UNREACHABLE
    return Exit.NO


def in_words(error: Exception) -> str:
    """An error in a single line. Errors of the application are shown with the type.

    Passwords are removed, because an error of the application may have a whole URL.
    """
    text = without_passwords(" ".join(str(error).split()))
    return text if isinstance(error, OutboxError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def say(*lines: RenderableType) -> None:
    """Print to stdout, for people. A ``str`` is markup, so a text with names must be a :func:`line`."""
    _print(_console(), lines)


def say_aside(*lines: RenderableType) -> None:
    """Print to stderr, for people: the progress of a command, apart from the answer."""
    _print(_console(stderr=True), lines)


def say_error(text: str) -> None:
    """A single line on stderr, of any length. Commands about tables get the words that name the outbox."""
    told = _OF_TABLES.sub(lambda found: f"`{with_outbox(found[1])}`", text)
    _print(_console(stderr=True), (line(("error:", "bold red"), " ", told),))


def say_json(value: object) -> None:
    """A JSON document on stdout, for machines."""
    sys.stdout.write(f"{json_of(value, indent=2)}\n")


def json_of(value: object, *, indent: int | None = None) -> str:
    """A value as JSON on a single line, or with ``indent``. No character can move the cursor or change colours."""
    encoded = msgspec.json.encode(value)
    return visible_json((encoded if indent is None else msgspec.json.format(encoded, indent=indent)).decode())


def line(*parts: str | tuple[str, str]) -> Text:
    """A line of a terminal. A part is a text, or a pair of text and style.

    No part is markup, so brackets in names are shown. Control characters are escaped.
    """
    return Text.assemble(*(visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts))


def indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 2), expand=False)


def terminal() -> Console:
    """The console of the answer: as wide as the terminal, or 100 columns without a terminal."""
    return _console()


def _print(console: Console, lines: tuple[RenderableType, ...]) -> None:
    for each in lines:
        console.print(each, soft_wrap=isinstance(each, str | Text))


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_PAGE
    return console


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for each in cast("ExceptionGroup[Exception]", error).exceptions:
            yield from _leaves(each)
    else:
        yield error


# --- values as people read them -------------------------------------------------------------------
#
# Values as people read them: states, ages, documents; and rows as machines read them, one JSON object on each line.


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
    """A state, coloured. The word alone says it too."""
    return line((str(state), COLOURS.get(state, "default")))


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago a moment (naive UTC) is: ``14 min``; the empty text for ``None``."""
    if moment is None:
        return ""
    seconds = ((now or datetime.now(UTC).replace(tzinfo=None)) - moment).total_seconds()
    return f"in {span(-seconds)}" if seconds < 0 else f"{span(seconds)} ago"


def span(seconds: float) -> str:
    """A duration in its largest unit: ``40 ms``, ``0.4 s``, ``14 min``, ``3 h``, ``2 d``."""
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit or (unit == _DAY and seconds >= unit):
            return f"{seconds / unit:.0f} {name}"
    if seconds < 0.1 * _SECOND:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds >= 10 * _SECOND else f"{seconds:.1f} s"


def moment(given: datetime | None) -> str:
    """A moment (naive UTC) to the second."""
    return "" if given is None else f"{given:%Y-%m-%d %H:%M:%S}"


def last_error(record: NotificationRecord) -> str:
    """The last error of a notification: ``TypeName: message``; the empty text without one, and after a success.

    A foreign tool may have written errors of a different shape: such errors are shown as they are.
    """
    if not record.errors or record.state is State.SUCCEEDED:
        return ""
    errors: object = record.errors
    last = errors[-1] if is_list(errors) else errors
    if not is_object(last):
        return str(last)
    return f"{last.get('type')}: {last.get('message')}".removesuffix(": ").removesuffix(": None")


def say_lines(values: Iterable[Any]) -> None:
    """One JSON object on each line of stdout (NDJSON), for machines."""
    for value in values:
        sys.stdout.write(f"{json_of(value)}\n")
    sys.stdout.flush()


def shortened(text: str, longest: int = 100) -> str:
    """The beginning of a text, on one line."""
    plain = " ".join(text.split())
    return plain if len(plain) <= longest else plain[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def duration(given: timedelta) -> str:
    return span(given.total_seconds())


# --- questions before an order that changes much --------------------------------------------------
#
# Questions before an order that changes much, and the progress of an order: on stderr, apart from the answer.


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
