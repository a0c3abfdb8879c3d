"""Signatures of handlers and hooks: a function that would fail on every call is rejected up front."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def signature_of(function: Callable[..., Any], *, unwraps: bool = False) -> inspect.Signature | None:
    """Return the signature of the function, or with ``unwraps`` of the wrapped function; ``None`` if unknown."""
    try:
        return inspect.signature(function, follow_wrapped=unwraps)
    except (ValueError, TypeError, NameError):  # a built-in function, or annotations with undefined names
        return None


def where_defined(function: Callable[..., Any]) -> str:
    """Return the module and qualified name of a function, for errors."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def missing_for(
    function: Callable[..., Any], arguments: int, keywords: Collection[str] = (), *, unwraps: bool = False
) -> str | None:
    """Return why ``arguments`` positional arguments and ``keywords`` do not fit; ``None`` if they do, or if unknown."""
    signature = signature_of(function, unwraps=unwraps)
    if signature is None:
        return None
    try:
        signature.bind(*[object()] * arguments, **dict.fromkeys(keywords))
    except TypeError:
        return _missing(signature, arguments, keywords)
    return None


def _missing(signature: inspect.Signature, arguments: int, keywords: Collection[str]) -> str:
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in POSITIONAL]
    takes_more = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if len(positional) < arguments and not takes_more:
        return f"takes {len(positional) or 'no'} positional argument{'s' * (len(positional) != 1)}"
    lacking = [p.name for p in positional[arguments:] if p.default is p.empty]
    lacking += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    lacking = [name for name in lacking if name not in keywords]
    return f"also requires {', '.join(map(repr, lacking))}"
