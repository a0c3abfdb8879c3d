"""The measure of readable words: of all words in a text, the share whose meaning the reader has to work out.

A pronoun or an indefinite makes the reader go back for its noun. Such words are counted in the comments and docstrings
of the package and in the pages, where code is left out. ``python -m tests.kit.words`` prints the two tables of
``tests/unit/test_words.py`` as they are now, and ``--write`` writes them there.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.kit.sources import ROOT, modules, text_of, tree_of

COUNTED = frozenset(
    {
        *("it", "its", "they", "them", "their", "those", "these", "one", "ones", "other", "others", "another"),
        *("what", "whatever", "who", "whoever", "whom", "whose"),
        *("anybody", "everybody", "nobody", "somebody", "anything", "everything", "nothing", "something"),
    }
)
BANNED = frozenset({"whoever", "nobody", "somebody"})

FEWEST = 150
"""Words of a file below which a share says little."""

_FENCED = re.compile(r"```.*?```", re.DOTALL)
_CODE = re.compile(r"``.*?``|`.*?`|::.*")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def pages() -> Iterator[Path]:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        if (ROOT / name).exists():
            yield ROOT / name
    yield from sorted((ROOT / "docs").rglob("*.md"))


@cache
def words_of(path: Path) -> Counter[str]:
    """How often each word is in a page, or in the comments and docstrings of a module."""
    text = text_of(path) if path.suffix == ".md" else "\n".join(_prose_of(path))
    return counted_in(text)


def counted_in(text: str) -> Counter[str]:
    return Counter(_WORD.findall(_CODE.sub(" ", _FENCED.sub(" ", text)).lower()))


def _prose_of(path: Path) -> Iterator[str]:
    tree, strings = tree_of(path), dict[int, list[tuple[int, int]]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        ):
            last = node.end_lineno or node.lineno
            for number in range(node.lineno, last + 1):
                begin = node.col_offset if number == node.lineno else 0
                end = (node.end_col_offset or 0) if number == last else sys.maxsize
                strings.setdefault(number, []).append((begin, end))
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if "#" in line:
            yield _comment_in(line.encode(), strings.get(number, []))


def _comment_in(line: bytes, strings: list[tuple[int, int]]) -> str:
    """The text behind the first ``#`` that is in no string. To find comments with ``tokenize`` takes much longer."""
    at = line.find(b"#")
    while at >= 0 and any(begin <= at < end for begin, end in strings):
        at = line.find(b"#", at + 1)
    return "" if at < 0 else line[at:].decode().lstrip("# ")


def share_of(words: Counter[str]) -> float:
    """In percent, to one decimal."""
    return round(100 * sum(words[word] for word in COUNTED) / max(1, words.total()), 1)


def shares(paths: Iterator[Path], fewest: int = 0) -> dict[str, float]:
    return {named(path): share_of(words_of(path)) for path in paths if words_of(path).total() >= max(1, fewest)}


def sum_of(paths: Iterator[Path]) -> Counter[str]:
    total = Counter[str]()
    for path in paths:
        total.update(words_of(path))
    return total


def banned(paths: Iterator[Path]) -> dict[str, int]:
    """The number of banned words in each file that has any."""
    found = {named(path): sum(words_of(path)[word] for word in BANNED) for path in paths}
    return {name: number for name, number in found.items() if number}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def main() -> None:
    from tests.unit.test_words import LIMIT

    above = {name: share for name, share in {**shares(modules(), FEWEST), **shares(pages())}.items() if share > LIMIT}
    tables = {
        "ABOVE": ("dict[str, float]", above),
        "STILL_BANNED": ("dict[str, int]", {**banned(modules()), **banned(pages())}),
    }
    for name, (kind, found) in tables.items():
        rows = "".join(f'\n    "{where}": {value},' for where, value in found.items())
        show_table(f"{name}: {kind} = {{{rows}\n}}", ROOT / "tests/unit/test_words.py")
    print(f"# outboxio {share_of(sum_of(modules()))} %, pages {share_of(sum_of(pages()))} %")


def show_table(table: str, file: Path) -> None:
    """Print a table; with ``--write``, put it into the test in place of the former table."""
    print(table)
    if "--write" in sys.argv:
        declared = re.escape(table.partition(" = ")[0])
        pattern = re.compile(rf"^{declared} = {{(?:}}|\n(?:    .*\n)*}})", re.MULTILINE)
        empty = table.replace("{\n}", "{}")
        file.write_text(pattern.sub(lambda _: empty, file.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
