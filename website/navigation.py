"""The navigation of the site, read from the pages, so that there is no separate list of pages.

A folder's pages are in the order of the links in its ``index.md``; a second-level heading there is a group. Pages that
the index does not link to come last. The title of a page is the text of its link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

SECTIONS = ("tutorial", "how-to", "operate", "reference", "explanation")

_ITEM = re.compile(
    r"^## (?P<group>.+)$|^(?:- |\d\. |\|[^\[\n]*)\[(?P<title>[^\]]+)\]\((?P<link>[^)#\s]+\.md)\)", re.MULTILINE
)

Entry = str | dict[str, Any]


def navigation(pages: Path) -> list[Entry]:
    """Return the navigation of all pages below a folder, in the format of mkdocs.yml."""
    sections: list[Entry] = [{"Home": "index.md"}, {"Start here": "start-here.md"}]
    for name in SECTIONS:
        title = title_of(pages / name / "index.md").partition(":")[0]
        sections.append({title: list(_section(pages, name))})
    return sections


def title_of(page: Path) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", page.read_text("utf-8"), re.MULTILINE)
    assert found is not None, f"{page} has no heading"
    return found[1].replace("`", "")


def _section(pages: Path, name: str) -> Iterator[Entry]:
    index = f"{name}/index.md"
    yield index
    listed = {index}
    title, group = "", list[Entry]()
    for item in _ITEM.finditer((pages / index).read_text("utf-8")):
        if item["group"]:
            if group:
                yield {title: group}
            title, group = item["group"], []
            continue
        page = normpath(join(name, item["link"]))
        if page in listed or not page.startswith(f"{name}/") or not (pages / page).exists():
            continue
        listed.add(page)
        entry = _entry(pages, page, item["title"].replace("`", ""), listed)
        if not title:
            yield entry
        else:
            group.append(entry)
    if group:
        yield {title: group}
    rest = sorted(path.relative_to(pages).as_posix() for path in (pages / name).rglob("*.md"))
    more = [{title_of(pages / page): page} for page in rest if page not in listed]
    if more:
        yield {"More": more}


def _entry(pages: Path, page: str, title: str, listed: set[str]) -> Entry:
    """Return a page under the title of its link; for the index of a folder, with the pages of that folder."""
    if not page.endswith("/index.md"):
        return {title: page}
    below: list[Entry] = list(_section(pages, dirname(page)))
    listed.update(path.relative_to(pages).as_posix() for path in (pages / dirname(page)).rglob("*.md"))
    return {title: below}
