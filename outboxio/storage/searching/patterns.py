"""Patterns of texts that appear in this order, with any text before, between and behind."""

from __future__ import annotations

import re
from collections.abc import Sequence

ESCAPE = "|"
_LIKE = re.compile(r"[%_|]")
_GLOB = re.compile(r"[*?\[]")
_WORDS = re.compile(r"[A-Za-z0-9_]+(?: [A-Za-z0-9_]+)*")


def like(texts: Sequence[str]) -> str | None:
    """The pattern for ``LIKE ... ESCAPE '|'``; ``None`` without texts."""
    return _joined("%", [_LIKE.sub(r"|\g<0>", text) for text in texts])


def glob(texts: Sequence[str]) -> str | None:
    """The pattern for ``GLOB`` of SQLite, which is case-sensitive."""
    return _joined("*", [_GLOB.sub(r"[\g<0>]", text) for text in texts])


def longest_word(texts: Sequence[str]) -> str:
    """The longest part of the texts that JSON does not escape, within the type or the message; may be empty."""
    return max((word for text in texts for word in _WORDS.findall(text)), key=len, default="")


def _joined(wildcard: str, texts: Sequence[str]) -> str | None:
    return wildcard.join(["", *texts, ""]) if texts else None
