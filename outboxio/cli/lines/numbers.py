"""Numbers on the command line: an unreadable number is refused with its text, and with the numbers that are meant."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import typer

from outboxio.support.text import briefly

_LONGEST = 30  # characters


def whole(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """The parser of a whole number."""
    meant = f"a whole number, {least} or more" if most == 2**63 - 1 else f"a whole number from {least} to {most}"

    def parse(text: str) -> int:
        plain = str(text).strip()
        if not (plain.isascii() and plain.isdigit() and len(plain) <= _LONGEST and least <= int(plain) <= most):
            raise typer.BadParameter(f"{briefly(text)}; expected {meant}")
        return int(plain)

    return parse


def seconds(least: float) -> Callable[[str], float]:
    """The parser of a number of seconds."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not (isfinite(number) and number >= least):
            raise typer.BadParameter(f"{briefly(text)}; expected a number of seconds, {least:g} or more")
        return number

    return parse
