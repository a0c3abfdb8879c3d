"""The source files of the package, each read and parsed once for all tests that check them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "outboxio"


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), str(path))


def modules(folder: Path = PACKAGE) -> Iterator[Path]:
    """The Python files below a folder, in the order of their names."""
    yield from sorted(folder.rglob("*.py"))
