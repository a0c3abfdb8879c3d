"""Convert the markup of docstrings to Markdown, for Griffe: roles become code, ``Example::`` becomes a code block."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|attr|exc|data|obj):`~?([^`]+)`")
_BLOCK = re.compile(r"^(?P<before>.*?)::\n\n(?P<code>(?:(?: {4,}.*)?\n)*(?: {4,}.*))", re.MULTILINE)

FENCE = "`" * 3


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown.

    Example::

        as_markdown("See :func:`drain`.") == "See `drain`."
    """
    text = _ROLE.sub(lambda role: f"`{role[1].removeprefix('outboxio.')}`", text)
    return _BLOCK.sub(_fenced, text)


def _fenced(block: re.Match[str]) -> str:
    lines = block["code"].split("\n")
    code = "\n".join(line[4:] for line in lines).strip("\n")
    before = block["before"]
    intro = "" if before.strip() in ("", "Example", "Examples") else f"{before}:\n\n"
    return f"{intro}{FENCE}python\n{code}\n{FENCE}"


class Marks(griffe.Extension):
    """A Griffe extension, called for each object of a loaded package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.docstring:
            return
        obj.docstring.value = as_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Class) and (fields := _fields(obj)):
            obj.docstring.value += f"\n\nFields:\n\n{FENCE}python\n{fields}\n{FENCE}"


def _fields(cls: griffe.Class) -> str:
    """Return the fields of a class without a constructor, such as a struct, one per line with type and default.

    The fields of a base class in the same module come first.
    """
    if "__init__" in cls.members:
        return ""
    bases = [cls.module.members.get(str(base)) for base in cls.bases]
    owners = [base for base in bases if isinstance(base, griffe.Class) and "__init__" not in base.members]
    members = [member for owner in (*owners, cls) for member in owner.members.values()]
    found = [member for member in members if isinstance(member, griffe.Attribute) and member.annotation]
    return "\n".join(
        f"{field.name}: {field.annotation}" + (f" = {field.value}" if field.value else "")
        for field in found
        if not field.name.startswith("_")
    )
