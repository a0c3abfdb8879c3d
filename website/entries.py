"""Find public names without a line ``::: outboxio.<name>`` on the API pages, and add the missing lines."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

import outboxio
import outboxio.errors
import outboxio.integrations
from website.stage import DOCS

API = DOCS / "reference" / "api"
_ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def public_modules() -> Iterator[str]:
    """Yield the modules with public names, besides the package itself."""
    yield from ("outboxio.testing", "outboxio.dashboard", "outboxio.sync", "outboxio.logs", "outboxio.telemetry")
    for found in pkgutil.iter_modules(outboxio.integrations.__path__):
        name = f"outboxio.integrations.{found.name}"
        if hasattr(importlib.import_module(name), "__all__"):
            yield name


def missing(module: str) -> list[str]:
    """Return the public names of a module without an entry. Errors are excluded: they have their own page."""
    text = "".join(page.read_text("utf-8") for page in sorted(API.glob("*.md")))
    entries = set(_ENTRY.findall(text)) | set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    names = set(importlib.import_module(module).__all__)
    if module == "outboxio":
        names -= set(outboxio.errors.__all__)
    return sorted(name for name in names if f"{module}.{name}" not in entries)


def complete() -> None:
    """Append the missing entries: names of the package to outbox.md, names of modules to brokers.md."""
    for name in missing("outboxio"):
        with (API / "outbox.md").open("a", encoding="utf-8") as page:
            page.write(f"\n::: outboxio.{name}\n")
    for module in public_modules():
        if not (names := missing(module)):
            continue
        page_path = API / "brokers.md"
        text = page_path.read_text("utf-8")
        heading = f"## `{module}`\n"
        lines = "".join(f"\n::: {module}.{name}\n    options:\n      heading_level: 3\n" for name in names)
        if heading not in text:
            text += f"\n{heading}"
        before, _, after = text.partition(heading)
        section, mark, rest = after.partition("\n## ")
        page_path.write_text(f"{before}{heading}{section}{lines}{mark}{rest}", "utf-8")
