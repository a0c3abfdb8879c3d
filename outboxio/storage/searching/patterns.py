"""Patterns of texts that appear in this order, with any text before, between and behind."""

from __future__ import annotations

import re
from collections.abc import Sequence

ESCAPE = "|"
_LIKE = re.compile(r"[%_|]")
_GLOB = re.compile(r"[*?\[]")


def like(texts: Sequence[str]) -> str | None:
    """The pattern for ``LIKE ... ESCAPE '|'``; ``None`` without texts."""
    return _joined("%", [_LIKE.sub(r"|\g<0>", text) for text in texts])


def glob(texts: Sequence[str]) -> str | None:
    """The pattern for ``GLOB`` of SQLite, which is case-sensitive."""
    return _joined("*", [_GLOB.sub(r"[\g<0>]", text) for text in texts])


def _joined(wildcard: str, texts: Sequence[str]) -> str | None:
    return wildcard.join(["", *texts, ""]) if texts else None
