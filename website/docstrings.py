"""Turns the marks of docstrings into Markdown, for Griffe: roles become code, ``Example::`` becomes a code block."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|attr|exc|data|obj):`~?([^`]+)`")
_BLOCK = re.compile(r"^(?P<before>.*?)::\n\n(?P<code>(?:(?: {4,}.*)?\n)*(?: {4,}.*))", re.MULTILINE)

FENCE = "`" * 3


def as_markdown(text: str) -> str:
    """The Markdown of a docstring.

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
    """Griffe calls this for each object that has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
