"""The site as plain text: each page's Markdown next to its HTML, ``llms.txt`` and ``llms-full.txt``.

A line ``::: outboxio.Outbox``, which in HTML becomes signatures and docstrings, is replaced by these in Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe

from website.docstrings import FENCE, Marks
from website.navigation import Entry
from website.stage import ROOT

SUMMARY = (
    "outboxio is an asyncio-native Python framework for the transactional outbox: an application commits its rows and "
    "the events they cause in one transaction, and the same application runs every interested async handler for each "
    "event, at least once, with retries, without a broker, on PostgreSQL, MySQL, MariaDB and SQLite."
)

_DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?: {4}.*\n|\n(?= {4}))*)", re.MULTILINE)
_LAYOUT = re.compile(r"^</?div.*>\n\n?|\n?\{ \.[\w. -]+ \}", re.MULTILINE)
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def write_plain(pages: Path, site: Path, navigation: list[Entry]) -> None:
    """Write the Markdown of all pages into the site, and the two files for language models."""
    for page in pages.rglob("*.md"):
        target = site / page.relative_to(pages)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(plain(page), "utf-8")
    (site / "llms.txt").write_text("\n".join(_list(pages, navigation)) + "\n", "utf-8")
    everything = [f"<!-- {path} -->\n\n{plain(pages / path)}" for path in _paths(navigation)]
    (site / "llms-full.txt").write_text(f"# outboxio\n\n> {SUMMARY}\n\n" + "\n\n".join(everything), "utf-8")


def plain(page: Path) -> str:
    """Return the Markdown of a page, with the docstrings that the HTML shows."""
    text = _LAYOUT.sub("", _FRONT.sub("", page.read_text("utf-8")))
    return _DIRECTIVE.sub(lambda match: "\n".join(_described(match[1])), text)


def _list(pages: Path, navigation: list[Entry]) -> Iterator[str]:
    yield f"# outboxio\n\n> {SUMMARY}\n"
    yield "Every page is plain Markdown. `llms-full.txt` has all pages in one file."
    for entry in navigation:
        assert isinstance(entry, dict)
        [(title, below)] = entry.items()
        yield f"\n## {title}\n"
        for path in _paths([below] if isinstance(below, str) else below):
            yield f"- [{_title(pages / path)}]({path}){_first_sentence(pages / path)}"


def _paths(entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
            continue
        for below in entry.values():
            yield from _paths([below] if isinstance(below, str) else below)


def _title(page: Path) -> str:
    found = re.search(r"^# (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return found[1] if found else page.stem


def _first_sentence(page: Path) -> str:
    body = page.read_text("utf-8").partition("\n# ")[2] or page.read_text("utf-8")
    for paragraph in body.split("\n\n")[1:]:
        if re.match(r"[A-Z`*\[]", paragraph):
            text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split()))
            return ": " + re.split(r"(?<=[.:]) ", text)[0].rstrip(":")
    return ""


def _described(path: str) -> Iterator[str]:
    """Yield a public object and its public members as Markdown."""
    package, _, name = path.partition(".")
    yield from _object(_read(package)[name], "##")


@cache
def _read(package: str) -> griffe.Module:
    read = griffe.load(
        package, search_paths=[str(ROOT)], resolve_aliases=True, extensions=griffe.load_extensions(Marks())
    )
    assert isinstance(read, griffe.Module)
    return read


def _object(found: griffe.Object | griffe.Alias, level: str, owner: str = "") -> Iterator[str]:
    name = f"{owner}{found.name}"
    target = found.final_target if isinstance(found, griffe.Alias) else found
    yield f"{level} `{name}`\n"
    if isinstance(target, griffe.Function | griffe.Class) and (signature := target.signature()):
        yield f"{FENCE}python\n{signature}\n{FENCE}\n"
    if target.docstring:
        yield target.docstring.value + "\n"
    if isinstance(target, griffe.Class):
        for each in target.all_members.values():
            is_public = not each.name.startswith("_") and each.docstring
            if is_public and (each.is_function or "property" in each.labels):
                yield from _object(each, level + "#", f"{name}.")
