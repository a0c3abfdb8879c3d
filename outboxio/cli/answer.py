"""What a command answers: text for people, JSON for machines, an exit code for scripts."""

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

from outboxio.errors import ConfigurationError, DatabaseUnavailable, OutboxError
from outboxio.passwords import without_passwords

_WIDTH_OF_A_PAGE = 100


class Exit(IntEnum):
    """What the exit code says."""

    FINE = 0
    NO = 1
    """The answer is no: a check failed, work is left."""
    USAGE = 2
    UNREACHABLE = 3


def answer(work: Callable[[], Coroutine[Any, Any, Exit]], *, as_json: bool = False, verbose: bool = False) -> None:
    """Run a command to its end, and exit with its code. An error is one line; with ``verbose``, a traceback too."""
    try:
        code: int = asyncio.run(work())
    except KeyboardInterrupt:
        code = 130  # as a shell says it: ended by SIGINT
    except Exception as error:
        if verbose:
            # With the lines of source around it, and in these there may be a URL.
            sys.stderr.write(without_passwords("".join(traceback.format_exception(error))))
        code = refuse(error, as_json=as_json)
    raise typer.Exit(code)


def refuse(error: Exception, *, as_json: bool) -> Exit:
    """Say what went wrong, and which exit code that is."""
    leaves = list(_leaves(error))
    say_error("; ".join(map(in_words, leaves)))
    if as_json:
        say_json({"error": {"type": type(leaves[0]).__name__, "message": without_passwords(str(leaves[0]))}})
    return exit_code(leaves[0])


def exit_code(error: Exception) -> Exit:
    """Whose fault an error is, as an exit code."""
    if isinstance(error, ConfigurationError):
        return Exit.USAGE
    if isinstance(error, DatabaseUnavailable):
        return Exit.UNREACHABLE
    return Exit.NO


def in_words(error: Exception) -> str:
    """An error in one line. Only outboxio's own errors are sure to say enough without their type.

    Others come from the application, which may have put a whole URL into them.
    """
    text = without_passwords(" ".join(str(error).split()))
    return text if isinstance(error, OutboxError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def say(*lines: RenderableType) -> None:
    """Print to stdout, for people."""
    _print(_console(), lines)


def say_aside(*lines: RenderableType) -> None:
    """Print to stderr, for people: what a command does, apart from what it answers."""
    _print(_console(stderr=True), lines)


def say_error(text: str) -> None:
    """One line on stderr, however long."""
    console = _console(stderr=True)
    console.print("[bold red]error:[/]", end=" ")
    console.print(text, markup=False, soft_wrap=True)


def say_json(value: object) -> None:
    """One JSON document on stdout, for machines."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 2), expand=False)


def terminal() -> Console:
    """Where people read a command's answer: as wide as the terminal, as wide as a page where there is none."""
    return _console()


def _print(console: Console, lines: tuple[RenderableType, ...]) -> None:
    for line in lines:
        console.print(line, soft_wrap=isinstance(line, str))


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
