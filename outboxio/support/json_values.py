"""Checks of JSON values that may have any shape: a tool of an application may have written the document.

A type checker knows the members of a checked value as ``object``. After ``isinstance(value, dict)``, a type checker
would accept every use of a member.
"""

from __future__ import annotations

from typing import TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """True for a JSON object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object]]:
    """True for a JSON list."""
    return isinstance(value, list)
