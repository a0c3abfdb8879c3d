"""Identifiers of rows, in time order, and of processes. A forked child generates different ones."""

from __future__ import annotations

from uuid import UUID, SafeUUID

from outboxio.support import machine

_VERSION_AND_VARIANT = (7 << 76) | (2 << 62)
_RANDOM_BITS = (1 << 62) - 1
_FRACTION = 245  # nanoseconds, rounded up, that change the fraction
_UNKNOWN = SafeUUID.unknown  # looking up an enum member is slow
_new, _set = UUID.__new__, object.__setattr__  # like the standard library's uuid7 in Python 3.14


def uuid7() -> UUID:
    """A UUIDv7 (RFC 9562): milliseconds, then a 12-bit fraction of a millisecond, then 62 random bits.

    The fraction keeps the ids of a process in order down to a quarter of a microsecond, so that rows of a burst are
    adjacent in the index. If the clock is set back, the ids of the process stay in order: only the fraction increases
    until the clock has caught up.
    """
    latest = machine.local("ids", _Latest)
    now = machine.time_ns()
    if now < latest.ns:
        now = latest.ns
    latest.ns = now + _FRACTION
    time = (now << 12) // 1_000_000  # in 4,096ths of a millisecond
    random = machine.random_bits() & _RANDOM_BITS
    made = _new(UUID)  # the checks of the constructor would take most of the time, and always pass here
    _set(made, "int", (time >> 12 << 80) | ((time & 0xFFF) << 64) | _VERSION_AND_VARIANT | random)
    _set(made, "is_safe", _UNKNOWN)
    return made


class _Latest:
    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0
        """The earliest nanosecond of the next id."""


class ProcessName:
    """The name of this process and outbox: host, process id and a random part. A forked child gets a new name.

    Example::

        name = ProcessName()
        name.text   # 'web-1:4711:9f3a02bc', and 'web-1:4712:51c0e7d4' in a forked child
    """

    def __init__(self) -> None:
        self._forks, self._text = _forks, _new_name()

    @property
    def text(self) -> str:
        if self._forks != _forks:
            self._forks, self._text = _forks, _new_name()
        return self._text


def _new_name() -> str:
    return f"{machine.host()[:100]}:{machine.pid()}:{machine.token(4)}"


_forks = 0
"""The number of forks between the original process and this one."""


def _count() -> None:
    global _forks
    _forks += 1


machine.in_forked_children(_count)
