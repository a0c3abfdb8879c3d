"""Count the words of a page, and print or rewrite the tables of file sizes that tests keep."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from tests.kit.sources import ROOT, text_of

_FENCED = re.compile(r"```.*?```", re.DOTALL)
_CODE = re.compile(r"``.*?``|`.*?`|::.*")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


@cache
def word_count(page: Path) -> int:
    """Count the words of a page without its code."""
    return len(_WORD.findall(_CODE.sub(" ", _FENCED.sub(" ", text_of(page))).lower()))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def show_table(table: str, file: Path) -> None:
    """Print a table; with ``--write``, replace the table in the test file."""
    print(table)
    if "--write" in sys.argv:
        declared = re.escape(table.partition(" = ")[0])
        pattern = re.compile(rf"^{declared} = {{(?:}}|\n(?:    .*\n)*}})", re.MULTILINE)
        empty = table.replace("{\n}", "{}")
        file.write_text(pattern.sub(lambda _: empty, file.read_text("utf-8")), "utf-8")
