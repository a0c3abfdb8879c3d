"""Passwords: what of a text with URLs in it may be shown."""

from __future__ import annotations

import re

# All between the scheme and the last @ of a word: a password that is not escaped may contain anything.
_USERINFO = re.compile(r"://[^\s'\"]*@")
_OPTION = re.compile(r"([?&](?:ssl)?password=)[^\s&'\"]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """The text without what stands for user and password in the URLs in it."""
    return _OPTION.sub(r"\1***", _USERINFO.sub("://***@", text))
