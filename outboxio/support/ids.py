"""Identifiers in the order of time."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from uuid import UUID, SafeUUID

_VERSION_AND_VARIANT = (7 << 76) | (2 << 62)
_RANDOM_BITS = (1 << 62) - 1
_FRACTION = 245  # nanoseconds, rounded up, that change the fraction
_new, _set = UUID.__new__, object.__setattr__  # as the standard library's own, from Python 3.14 on


def uuid7() -> UUID:
    """A UUIDv7 (RFC 9562): milliseconds, then a 12-bit fraction of a millisecond, then 62 random bits.

    The fraction keeps the ids of a process in order down to a quarter of a microsecond, so that the rows of a burst are
    neighbours in the index. When the clock of the machine is set back, the ids of the process stay in order: the time
    in the ids stands still, except for the fraction, until the clock has caught up.
    """
    global _latest
    now = time.time_ns()
    if now < _latest:
        now = _latest
    _latest = now + _FRACTION
    milliseconds, nanoseconds = divmod(now, 1_000_000)
    fraction = (nanoseconds << 12) // 1_000_000
    random = _random() & _RANDOM_BITS
    made = _new(UUID)  # the checks of the constructor take longer than all the rest, and always pass here
    _set(made, "int", (milliseconds << 80) | (fraction << 64) | _VERSION_AND_VARIANT | random)
    _set(made, "is_safe", SafeUUID.unknown)
    return made


_latest = 0  # the earliest nanosecond of the next id
_randoms: Iterator[int] = iter(())
_AT_ONCE = struct.Struct("256Q")  # a system call for each would cost more than all the rest of an id


def _random() -> int:
    """64 random bits of the system's."""
    global _randoms
    for bits in _randoms:
        return bits
    _randoms = iter(_AT_ONCE.unpack(os.urandom(_AT_ONCE.size)))
    return next(_randoms)


def _forget() -> None:
    """Drop the random bits in a forked process, which must not use the bits of the parent."""
    global _randoms
    _randoms = iter(())


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_forget)
