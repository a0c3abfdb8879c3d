"""Signatures of handlers and hooks: a function that would fail in every call is refused before the first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of the function itself, not of a wrapped function; ``None`` if the signature is unknown."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError, NameError):  # a built-in function, or annotations with undefined names
        return None


def missing_for(function: Callable[..., Any], arguments: int) -> str | None:
    """The reason why ``arguments`` positional arguments do not fit; ``None`` if they fit, or if it is unknown."""
    signature = signature_of(function)
    if signature is None:
        return None
    try:
        signature.bind(*[object()] * arguments)
    except TypeError:
        return _missing(signature, arguments)
    return None


def _missing(signature: inspect.Signature, arguments: int) -> str:
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in POSITIONAL]
    takes_more = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if len(positional) < arguments and not takes_more:
        return f"takes {len(positional) or 'no'} positional argument{'s' * (len(positional) != 1)}"
    lacking = [p.name for p in positional[arguments:] if p.default is p.empty]
    lacking += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return f"also requires {', '.join(map(repr, lacking))}"
