"""Rate-limited logging: at most one entry a second for each key, with the number of suppressed entries.

The first entry of a key is written at once and starts a period of one second. Further entries of the key within the
period are only counted. When it ends, the most severe of them is written together with the number of the others, and
the next period starts. When ``running()`` exits, :func:`flush_limiters` writes the counts of periods that have not
ended, so every suppressed entry is accounted for.

An entry below the limit costs one dictionary lookup and sets no timer.
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
MOST_REMEMBERED = 100  # keys; with more keys, finished periods are removed
_SUM = " (and %d more like it within %.1f s)"


class _Entry(Struct, frozen=True):
    """The entry that represents all suppressed entries of its period."""

    level: int
    message: str
    args: tuple[object, ...]
    fields: dict[str, object]


class _Period(Struct):
    """The period of a key between two written entries."""

    ends: float
    """Event loop time."""
    counted: int = 0
    """The number of suppressed entries."""
    level: int = 0
    """The most severe level of the suppressed entries."""
    entry: _Entry | None = None


class LogLimiter:
    """Limits the entries of a logger to one a second for each key.

    Example::

        key = (handler_name, error_type)
        if limiter.admits(key, logging.WARNING):  # otherwise the entry is only counted
            limiter.log(key, logging.WARNING, "handler %r failed: %s", handler_name, error, handler=handler_name)
    """

    def __init__(self, logger: Log) -> None:
        self._logger = logger
        self._periods: dict[Hashable, _Period] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def admits(self, key: Hashable, level: int) -> bool:
        """Count an entry, and return True if it must be passed to :meth:`log`; other entries need not be built."""
        if not self._logger.isEnabledFor(level):
            return False
        loop = self._current_loop()
        if loop is None:
            return True
        period = self._periods.get(key)
        if period is None or (not period.counted and loop.time() >= period.ends):
            return True
        period.counted += 1
        if self._timer is None:
            self._set_timer(loop, period.ends)
        if level <= period.level:
            return False
        period.level = level
        return True

    def log(self, key: Hashable, level: int, message: str, *args: object, **fields: Any) -> None:
        """Write an admitted entry, or keep it until the period ends."""
        loop = self._current_loop()
        if loop is not None:
            period = self._periods.get(key)
            if period is not None and period.counted:
                period.entry = _Entry(level, message, args, as_fields(fields))
                return
            self._begin(key, loop.time())
        self._logger.log(level, f"{message}%s", *args, "", stacklevel=2, **fields)

    def flush(self) -> None:
        """Write the suppressed entries, and reset."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _pending.pop(self, None)
        periods, self._periods = self._periods, {}
        for period in periods.values():
            self._write(period)

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return True if the limiter is used by this event loop."""
        return self._loop is loop

    def _current_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the running event loop; ``None`` (write at once) if none runs, or if another loop uses the limiter."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return None
        if running is not self._loop:
            if self._loop is not None and self._loop.is_running():
                return None  # in another thread
            self.flush()  # the timer of the previous loop is lost
            self._loop = running
        return running

    def _begin(self, key: Hashable, now: float) -> None:
        """Start the period of a key. Finished periods are removed if there are many."""
        if len(self._periods) >= MOST_REMEMBERED:
            self._periods = {k: each for k, each in self._periods.items() if each.counted or now < each.ends}
        self._periods[key] = _Period(now + PERIOD)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        self._timer = loop.call_at(at, self._periods_end, loop, context=contextvars.Context())
        _pending[self] = None

    def _periods_end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write the entries of the finished periods."""
        self._timer = None
        now = loop.time()
        over = {key: each for key, each in self._periods.items() if each.counted and now >= each.ends}
        self._periods.update({key: _Period(now + PERIOD) for key in over})
        self._periods = {key: each for key, each in self._periods.items() if each.counted or now < each.ends}
        ends = [each.ends for each in self._periods.values() if each.counted]
        if ends:
            self._set_timer(loop, min(ends))
        else:
            _pending.pop(self, None)
        for period in over.values():
            self._write(period)

    def _write(self, period: _Period) -> None:
        # In an empty context: otherwise logging filters would attribute the entry to the current run.
        if period.entry is not None:
            contextvars.Context().run(self._write_entry, period, period.entry)

    def _write_entry(self, period: _Period, entry: _Entry) -> None:
        more = period.counted - 1
        fields = {**entry.fields, **(as_fields({"suppressed": more}) if more else {})}
        summary = _SUM % (more, PERIOD) if more else ""
        self._logger.log(entry.level, f"{entry.message}%s", *entry.args, summary, extra=fields)


_pending: dict[LogLimiter, None] = {}
"""The limiters with suppressed entries."""


def flush_limiters() -> None:
    """Write the suppressed entries of the running event loop. Called before ``running()`` exits."""
    loop = asyncio.get_running_loop()
    for limiter in [limiter for limiter in _pending if limiter.is_of(loop)]:
        limiter.flush()


@atexit.register
def _end_all() -> None:
    """Write the suppressed entries if your application exits without leaving ``running()``."""
    for limiter in list(_pending):
        limiter.flush()
