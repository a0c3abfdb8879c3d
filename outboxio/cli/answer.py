"""The answer of a command: text for people, JSON for machines, an exit code for scripts."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from enum import IntEnum
from typing import Any, cast

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from outboxio.errors import ConfigurationError, DatabaseUnavailable, OutboxError
from outboxio.support.text import visible, visible_json, without_passwords

_WIDTH_OF_A_PAGE = 100


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
    try:
        code: int = asyncio.run(work())
    except (KeyboardInterrupt, typer.Abort):  # an interrupted question is an Abort
        code = 130  # 128 + SIGINT, as in a shell
    except Exception as error:
        if verbose:
            # The traceback shows lines of source, which may have a URL with a password.
            text = without_passwords("".join(traceback.format_exception(error)))
            sys.stderr.write("\n".join(map(visible, text.split("\n"))))
        code = refuse(error, as_json=as_json, report=report)
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
    """A single line on stderr, of any length."""
    _print(_console(stderr=True), (line(("error:", "bold red"), " ", text),))


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
