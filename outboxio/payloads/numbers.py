"""Numbers in JSON that a database would change: refused, or written in a spelling that the database keeps.

MariaDB and SQLite store the text of a document. PostgreSQL and MySQL store values:

============  ==========================================================  ==========================================
Database      Number in JSON                                              Stored
============  ==========================================================  ==========================================
PostgreSQL    float ``-0.0``                                              ``0.0``, so it is refused
PostgreSQL    float from 1e16 on                                          an integer, unless written as ``1...0.0``
MySQL         integer below -2^63 or above 2^64-1                         a double, so it is refused
MySQL         decimal number of more than 15 digits                       a double, so it is refused if that differs
============  ==========================================================  ==========================================

Each check is a scan of the JSON text that finds suspicious texts; only these are decoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import inspect

from outboxio.payloads.ekbatan import has_style, parts_of
from outboxio.payloads.models import is_model
from outboxio.support.codec import Check, refuse_leaf

# A number begins behind a colon, a comma or a bracket: documents are written without spaces. The exponent of a float is
# written with a small letter and without a plus, the exponent of a Decimal with a capital and a sign.
_CHANGED_BY_NUMERIC = re.compile(rb"[:,\[]-(?:0[.,}\]eE])|[:,\[]-?[0-9][0-9.]*(?:e[0-9]|E[+-])")
_STRING_OR_EXPONENT = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.]*[eE][+-]?[0-9]+')

_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_SIXTEEN_DIGITS = b"0" * 16
"""A double keeps all decimal numbers of up to 15 digits."""
_LONGEST_NUMERIC = 131_072  # digits before the point, on PostgreSQL
_FINEST_NUMERIC = 16_383  # digits behind the point

_decode: Callable[[bytes], Any] = msgspec.json.Decoder(float_hook=Decimal).decode


def kept_by_numeric(document: bytes, subject: str) -> bytes:
    """The check of PostgreSQL, whose ``jsonb`` stores numbers as ``numeric``."""
    if _CHANGED_BY_NUMERIC.search(document) is None:
        return document
    decoded = _decode(document)
    refuse_leaf(decoded, subject, _is_negative_zero, "is -0.0, which PostgreSQL stores as 0.0; add 0.0 to the number")
    refuse_leaf(decoded, subject, _exceeds_numeric, "is {}, which has more digits than PostgreSQL stores; use a string")
    return _STRING_OR_EXPONENT.sub(_without_exponent, document)


def kept_by_double(document: bytes, subject: str) -> bytes:
    """The check of MySQL, whose JSON stores integers of 64 bits, and all other numbers as doubles."""
    if _SIXTEEN_DIGITS in document.translate(_AS_ZEROS, b".") or b"E+" in document or b"E-" in document:
        refuse_leaf(
            _decode(document), subject, _is_changed_by_double,
            "is {}, which MySQL would round: its JSON holds integers of 64 bits, and other numbers of about 15 "
            "digits; use a string",
        )  # fmt: skip
    return document


def needs_check(cls: Any, check: Check) -> bool:
    """True if an object of an event class, whose fields are of their types, may hold a number that ``check`` finds."""
    if is_model(cls) or has_style(cls):
        return True
    return _may_hold(inspect.type_info(cls), inspect.FloatType if check is kept_by_numeric else inspect.IntType, set())


def _may_hold(info: Any, kind: type[inspect.Type], seen: set[int]) -> bool:
    if id(info) in seen:
        return False  # a type that contains itself
    seen.add(id(info))
    may_be_any = isinstance(info, inspect.AnyType | inspect.CustomType | inspect.RawType)
    return may_be_any or isinstance(info, kind) or any(_may_hold(part, kind, seen) for part in parts_of(info))


def _is_negative_zero(leaf: object) -> bool:
    return isinstance(leaf, Decimal) and leaf.is_zero() and leaf.is_signed()


def _exceeds_numeric(leaf: object) -> bool:
    if not isinstance(leaf, Decimal):
        return False
    exponent = leaf.as_tuple().exponent
    return leaf.adjusted() >= _LONGEST_NUMERIC or (isinstance(exponent, int) and exponent < -_FINEST_NUMERIC)


def _is_changed_by_double(leaf: object) -> bool:
    if isinstance(leaf, int):
        return not -(2**63) <= leaf < 2**64
    if isinstance(leaf, Decimal):
        stored = float(leaf)
        return not math.isfinite(stored) or Decimal(repr(stored)) != leaf
    return False


def _without_exponent(match: re.Match[bytes]) -> bytes:
    text = match[0]
    if text.startswith(b'"'):
        return text
    plain = f"{Decimal(text.decode()):f}".encode()
    return plain if b"." in plain else plain + b".0"
