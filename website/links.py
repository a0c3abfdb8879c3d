"""Check a built site: every link and anchor has a target, and no page loads anything from another server."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote, urlsplit

_LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
_QUIET = {"canonical", "alternate", "next", "prev"}
"""Relations of a ``link`` element that a browser does not load."""

_BORING = re.compile(r'</?(?!script|style)[a-z]\w*(?: class="[^"<>]*")?>')
"""Tags without anchors and links: nine of ten in a page with code, so parsing them would take most of the time."""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        quiet = tag == "link" and bool(_QUIET & set((values.get("rel") or "").split()))
        for name in ("href", "src"):
            if (value := values.get(name)) is None:
                continue
            if (tag, name) in _LOADED and not quiet:
                self.loads.append(value)
            if tag != "base":
                self.links.append(value)


def problems(site: Path) -> list[str]:
    """Return each broken link, missing anchor and load from another server, as ``page: link``."""
    pages = {path.relative_to(site).as_posix(): _read(path) for path in sorted(site.rglob("*.html"))}
    exists, is_folder = cache(lambda aim: (site / aim).exists()), cache(lambda aim: (site / aim).is_dir())
    found = []
    for name, page in pages.items():
        found += [f"{name}: loads {url}" for url in page.loads if urlsplit(url).netloc]
        if name == "404.html":
            continue  # its links start at the root of the server
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("data:"):
                continue
            aim = normpath(join(dirname(name), unquote(parts.path))) if parts.path else name
            aim = aim + "/index.html" if is_folder(aim) else aim
            if not exists(aim):
                found.append(f"{name}: {link}")
            elif parts.fragment and aim in pages and unquote(parts.fragment) not in pages[aim].anchors | {"__skip"}:
                found.append(f"{name}: {link} (no such anchor)")
    return found


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(_BORING.sub("", path.read_text("utf-8")))
    return page
