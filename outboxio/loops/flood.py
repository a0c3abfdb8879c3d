"""Floods of equal log entries: one entry a second for each key, with the number of the entries that were not written.

The first entry of a key is written at once, and begins a period of a second. Entries of the key within the period are
counted. At the end of the period the most severe of them is written, with the number of the others, and begins the next
period. So no entry is lost without a trace: at the end of the period, or at the latest when the outbox is left,
:func:`end_floods` writes the numbers.

A key without a flood costs a look into a dictionary, and has no timer.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
from collections.abc import Hashable
from typing import Any

from msgspec import Struct

from outboxio.support.log import Log, as_fields

PERIOD = 1.0  # seconds between two entries of a key
MOST_REMEMBERED = 100  # keys; more keys than that are forgotten as soon as their period is over
_SUM = " (and %d more like it within %.1f s)"


class _Entry(Struct, frozen=True):
    """An entry that stands for all counted entries of its period."""

    level: int
    message: str
    args: tuple[object, ...]
    fields: dict[str, object]


class _Period(Struct):
    """The period of a key, from a written entry to the next."""

    ends: float
    """By the event loop's clock."""
    counted: int = 0
    """The entries of the period that were not written."""
    level: int = 0
    """The most severe level of the counted entries."""
    entry: _Entry | None = None


class Flood:
    """Writes the entries of a logger, at most one a second for each key.

    Example::

        key = (handler_name, error_type)
        if flood.admits(key, logging.WARNING):  # otherwise the entry is only counted
            flood.log(key, logging.WARNING, "handler %r failed: %s", handler_name, error, handler=handler_name)
    """

    def __init__(self, logger: Log) -> None:
        self._logger = logger
        self._periods: dict[Hashable, _Period] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._home: asyncio.AbstractEventLoop | None = None

    def admits(self, key: Hashable, level: int) -> bool:
        """Count an entry. True if :meth:`log` has to be called for the entry; the call costs the words of the entry."""
        if not self._logger.isEnabledFor(level):
            return False
        home = self._own_loop()
        if home is None:
            return True
        period = self._periods.get(key)
        if period is None or (not period.counted and home.time() >= period.ends):
            return True
        period.counted += 1
        if self._timer is None:
            self._set_timer(home, period.ends)
        if level <= period.level:
            return False
        period.level = level
        return True

    def log(self, key: Hashable, level: int, message: str, *args: object, **fields: Any) -> None:
        """Write an admitted entry, or keep the entry until the end of the period."""
        home = self._own_loop()
        if home is not None:
            period = self._periods.get(key)
            if period is not None and period.counted:
                period.entry = _Entry(level, message, args, as_fields(fields))
                return
            self._begin(key, home.time())
        self._logger.log(level, f"{message}%s", *args, "", stacklevel=2, **fields)

    def end(self) -> None:
        """Write the entries that stand for the counted entries, and begin anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _flooded.pop(self, None)
        periods, self._periods = self._periods, {}
        for period in periods.values():
            self._write(period)

    def is_of(self, home: asyncio.AbstractEventLoop) -> bool:
        """True if the entries come from this event loop."""
        return self._home is home

    def _own_loop(self) -> asyncio.AbstractEventLoop | None:
        """The running event loop, or ``None`` if entries are written at once: without a loop, or for a second loop."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return None
        if running is not self._home:
            if self._home is not None and self._home.is_running():
                return None  # in another thread
            self.end()  # the timer of the former loop is lost
            self._home = running
        return running

    def _begin(self, key: Hashable, now: float) -> None:
        """A period of a key begins. Periods that are over are forgotten if there are many."""
        if len(self._periods) >= MOST_REMEMBERED:
            self._periods = {k: each for k, each in self._periods.items() if each.counted or now < each.ends}
        self._periods[key] = _Period(now + PERIOD)

    def _set_timer(self, home: asyncio.AbstractEventLoop, moment: float) -> None:
        self._timer = home.call_at(moment, self._periods_end, home, context=contextvars.Context())
        _flooded[self] = None

    def _periods_end(self, home: asyncio.AbstractEventLoop) -> None:
        """Write the entries of the periods that are over."""
        self._timer = None
        now = home.time()
        over = {key: each for key, each in self._periods.items() if each.counted and now >= each.ends}
        self._periods.update({key: _Period(now + PERIOD) for key in over})
        self._periods = {key: each for key, each in self._periods.items() if each.counted or now < each.ends}
        ends = [each.ends for each in self._periods.values() if each.counted]
        if ends:
            self._set_timer(home, min(ends))
        else:
            _flooded.pop(self, None)
        for period in over.values():
            self._write(period)

    def _write(self, period: _Period) -> None:
        # Not in the context of a run: filters and other libraries would take the entries for entries of that run.
        if period.entry is not None:
            contextvars.Context().run(self._write_entry, period, period.entry)

    def _write_entry(self, period: _Period, entry: _Entry) -> None:
        more = period.counted - 1
        fields = {**entry.fields, **(as_fields({"suppressed": more}) if more else {})}
        told = _SUM % (more, PERIOD) if more else ""
        self._logger.log(entry.level, f"{entry.message}%s", *entry.args, told, extra=fields)


_flooded: dict[Flood, None] = {}
"""The floods with counted entries."""


def end_floods() -> None:
    """Write the counted entries of the running event loop now: nothing may be left when an outbox is left."""
    home = asyncio.get_running_loop()
    for flood in [flood for flood in _flooded if flood.is_of(home)]:
        flood.end()


@atexit.register
def _end_all() -> None:
    """The event loop of an application may end without leaving the outbox."""
    for flood in list(_flooded):
        flood.end()
