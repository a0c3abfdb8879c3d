"""The sources of the site: the pages of docs/, and a page for each file outside docs/ that they link to.

On GitHub, a link from docs/ to ``examples/shop/shop/outbox.py`` shows the file. On the site, the file becomes a page
with the code in a block.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OUTSIDE = "project"
"""The site's folder for pages made from files outside docs/."""

UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter that excludes a page from the site's search."""

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {
    ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".ini": "ini", ".sql": "sql",
    ".service": "ini",
}  # fmt: skip


def stage(target: Path) -> list[str]:
    """Copy all pages into ``target``, and return their paths relative to that folder."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DOCS, target)
    waiting = [path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    done = set[str]()
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        place = target / placed(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if is_picture(source):
            shutil.copyfile(ROOT / source, place)
            continue
        text, linked = _page(source)
        place.write_text(text, "utf-8")
        waiting.extend(linked)
    return sorted(placed(source) for source in done if not is_picture(source))


def is_picture(source: str) -> bool:
    return source.endswith((".png", ".svg"))


def placed(source: str) -> str:
    """Return the path in the site of the page for a project file: ``docs/a.md`` is ``a.md``."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"{OUTSIDE}/{source}" if source.endswith(".md") or is_picture(source) else f"{OUTSIDE}/{source}.md"


def _page(source: str) -> tuple[str, list[str]]:
    """Return the text of a page, with links to the site's pages, and the files outside docs/ that it links to."""
    file = ROOT / source
    if file.is_dir():
        return _folder(source)
    text = file.read_text("utf-8")
    if not source.endswith(".md"):
        fence = "````"
        return f"{UNSEARCHED}# {source}\n\n{fence}{_LANGUAGES.get(file.suffix, 'text')}\n{text}\n{fence}\n", []
    linked: list[str] = []

    def turned(link: re.Match[str]) -> str:
        if re.match(r"\w+:", link[2]):
            return link[0]
        aim = normpath(join(dirname(source), link[2]))
        if not (ROOT / aim).exists():
            return link[0]
        if not aim.startswith("docs/"):
            linked.append(aim)
        place = placed(aim)
        return link[1] + relpath(place, dirname(placed(source)) or ".") + link[3]

    changed = outside_code(text, lambda prose: _LINK.sub(turned, prose))
    return UNSEARCHED * (source in ("CHANGELOG.md", "CONTRIBUTING.md")) + changed, linked


def outside_code(text: str, change: object) -> str:
    """Apply a function to the text outside fenced code."""
    assert callable(change)
    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def _folder(source: str) -> tuple[str, list[str]]:
    """Return a page that lists the files of a folder."""
    files = list(_files(ROOT / source))
    page = placed(source)
    rows = [f"- [{name.removeprefix(source + '/')}]({relpath(placed(name), dirname(page))})" for name in files]
    return f"# {source}\n\n" + "\n".join(rows) + "\n", files


def _files(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix not in (".pyc", ".png", ".db"):
            yield file.relative_to(ROOT).as_posix()
