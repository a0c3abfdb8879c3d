"""Measure the source: the lines of files, classes and functions, and the attributes of classes.

``python -m tests.kit.house`` prints the table of ``tests/unit/test_house.py`` as it is now; ``--write`` writes it
there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.kit.file_tables import named, show_table
from tests.kit.sources import ROOT, modules, text_of, tree_of

LIMITS = {"file lines": 450, "class lines": 300, "class attributes": 20, "function lines": 50}


def sizes() -> Iterator[tuple[str, str, int]]:
    """The kind of each measurement, its place, and the value."""
    for path in modules():
        name = named(path)
        yield "file lines", name, text_of(path).count("\n")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                yield "class lines", f"{name}:{node.name}", lines_of(node)
                yield "class attributes", f"{name}:{node.name}", len(attributes_of(node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield "function lines", f"{name}:{node.name}", lines_of(node)


def lines_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines without the docstring."""
    doc = ast.get_docstring(node, clean=False)
    return (node.end_lineno or node.lineno) - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The names that methods assign on ``self``."""
    targets = [
        target
        for each in ast.walk(node)
        if isinstance(each, ast.Assign | ast.AnnAssign)
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
    ]
    return {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}


@cache
def above() -> dict[tuple[str, str], int]:
    """All sizes above their limit; the largest of several parts with the same name."""
    found: dict[tuple[str, str], int] = {}
    for kind, name, size in sizes():
        if size > LIMITS[kind]:
            found[kind, name] = max(size, found.get((kind, name), 0))
    return found


def main() -> None:
    rows = "".join(f'\n    ("{kind}", "{name}"): {size},' for (kind, name), size in sorted(above().items()))
    show_table(f"ABOVE: dict[tuple[str, str], int] = {{{rows}\n}}", ROOT / "tests/unit/test_house.py")


if __name__ == "__main__":
    main()
