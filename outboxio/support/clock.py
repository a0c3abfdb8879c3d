"""Time: naive UTC with microseconds, by the clock of the database.

Between two reads of the database's clock, the time is extrapolated with the steady clock of this machine. Neither users
nor time services can set a steady clock, so a step of the machine's wall clock has no effect.

The database's clock can jump too, for some seconds or permanently. The steady clock reveals such a jump, and outboxio
follows it in two steps:

* Reversible decisions, such as when a row is due, follow after 1 minute (``FOLLOWED_AFTER``).
* Irreversible decisions follow after 10 minutes (``SETTLED_AFTER``, :meth:`ShardClock.settled`): rows expire, old rows
  are removed, handlers count as gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from outboxio.support import machine
from outboxio.support.duration import format_duration
from outboxio.support.log import log_of

logger = log_of(__name__)

Clock = Callable[[], datetime]
"""Returns the current time, naive UTC."""

SLIGHT = timedelta(minutes=1)  # smaller differences are corrected at once; larger ones are jumps
FOLLOWED_AFTER = timedelta(minutes=1)  # how long a jump must last before rows become due by the new time
SETTLED_AFTER = timedelta(minutes=10)  # how long a jump must last before rows expire or are removed
FRESH = timedelta(minutes=1)  # the age after which the database's clock is read again
_NONE = timedelta()


def utc_now() -> datetime:
    """Return the current time by the wall clock of this machine, naive UTC with microseconds."""
    return from_micros(machine.time_ns() // 1000)  # a third faster than datetime.now(UTC).replace(...)


EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)


def as_micros(timestamp: datetime) -> int:
    """Return a naive UTC timestamp as microseconds since 1970."""
    return (timestamp - EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """Return the naive UTC timestamp ``micros`` microseconds after the start of 1970."""
    return EPOCH + timedelta(microseconds=micros)


def naive_utc(timestamp: datetime) -> datetime:
    """Return the timestamp as naive UTC; a naive ``timestamp`` counts as UTC.

    Applications express "no limit" as the first or last timestamp of the calendar in a local time zone. If it lies
    outside of the calendar in UTC, the first or last timestamp of the calendar is returned.
    """
    if timestamp.tzinfo is None:
        return timestamp
    try:
        return timestamp.astimezone(UTC).replace(tzinfo=None)
    except OverflowError:
        return datetime.min if timestamp.year == 1 else datetime.max


def steady_now() -> datetime:
    """Return the time of a clock that cannot be set. Only the difference between two such times is meaningful."""
    return from_micros(machine.steady_ns() // 1000)


class _Jump(Struct, frozen=True):
    """The offset after a jump of the database's clock, and when it was detected, by the steady clock."""

    offset: timedelta
    noticed: datetime


class ShardClock:
    """The clock of a shard: the time of the database, extrapolated with the steady clock of this machine.

    So machines agree on due rows even if their wall clocks differ by minutes. Until the first read of the database's
    clock, the wall clock of this machine is used. A user-supplied clock (``Outbox(clock=...)``) is never corrected.
    """

    def __init__(self, user_clock: Clock | None, shard: str = "default") -> None:
        self._user_clock = user_clock
        self._shard = shard
        self._offset_us: int | None = None
        self._read_at = datetime.min
        self._jump: _Jump | None = None
        self._settles_at = datetime.min
        self.ahead = _NONE
        """How far :meth:`settled` lags behind, because a jump has not lasted long enough."""

    @property
    def is_user_supplied(self) -> bool:
        """True if ``Outbox(clock=...)`` is used, so that the database's clock is not read."""
        return self._user_clock is not None

    def __call__(self) -> datetime:
        offset = self._offset_us
        if offset is not None:
            return EPOCH + timedelta(microseconds=machine.steady_ns() // 1000 + offset)
        return utc_now() if self._user_clock is None else naive_utc(self._user_clock())

    def settled(self) -> datetime:
        """Return the time for irreversible decisions, which is never later than the time of the clock.

        After a jump of the database's clock into the future, the old time continues until the new time has lasted for
        10 minutes (``SETTLED_AFTER``).
        """
        return self() - self.ahead

    @property
    def offset(self) -> timedelta | None:
        """The difference to the steady clock; ``None`` until the database's clock was read."""
        return None if self._offset_us is None else timedelta(microseconds=self._offset_us)

    async def measure(self, read: Callable[[], Awaitable[datetime]]) -> None:
        """Read the database's clock, unless the last read was less than 1 minute ago (``FRESH``)."""
        if self._user_clock is None and steady_now() - self._read_at > FRESH:
            sent = steady_now()
            self.correct(await read(), sent, steady_now())

    def correct(self, database_now: datetime, sent: datetime, received: datetime) -> None:
        """Follow the database's clock, which was read between two times of :func:`steady_now`.

        After a slow read it is not known when the clock was read. The current offset is kept if possible, so that due
        rows stay due. A jump is followed only after it has lasted for 1 minute.
        """
        if self._user_clock is not None:
            return
        least, most = database_now - received, database_now - sent
        found, offset = least + (most - least) / 2, self.offset
        if offset is None:
            self._adopt(found, received)
        elif least <= offset <= most:
            self._keep(offset)
        elif abs(found - offset) <= SLIGHT:
            self._keep(found)
        else:
            self._detect_jump(found, found - offset, received)
        self._read_at = received
        if self.ahead and received >= self._settles_at:
            logger.warning("shard %s: trusting the database clock again", self._shard, shard=self._shard)
            self.ahead = _NONE

    def _adopt(self, found: timedelta, now: datetime) -> None:
        """Follow the first read; irreversible decisions wait if the wall clock of this machine differs."""
        self._set(found)
        ahead = now + found - utc_now()
        if ahead > SLIGHT:
            self.ahead, self._settles_at = ahead, now + SETTLED_AFTER
            logger.warning(
                "shard %s: the database clock is %s ahead of the clock of this host; using the database clock, but "
                "ignoring the difference for %s when rows expire or are removed, and when handlers count as gone",
                self._shard, _in_seconds(ahead), format_duration(SETTLED_AFTER),
                shard=self._shard, seconds=ahead.total_seconds(),
            )  # fmt: skip

    def _keep(self, offset: timedelta) -> None:
        if self._jump is not None:
            logger.warning(
                "shard %s: the database clock has jumped back; the jump had no effect", self._shard, shard=self._shard
            )
            self._jump = None
        self._set(offset)

    def _detect_jump(self, found: timedelta, moved: timedelta, now: datetime) -> None:
        """Record a jump of the database's clock, and follow it after 1 minute (``FOLLOWED_AFTER``)."""
        jump = self._jump
        if jump is None or abs(found - jump.offset) > SLIGHT:
            self._jump = _Jump(found, now)
            logger.warning(
                "shard %s: the database clock jumped by %s; ignoring the jump for %s, and for %s when rows expire or "
                "are removed, and when handlers count as gone",
                self._shard, _in_seconds(moved), format_duration(FOLLOWED_AFTER), format_duration(SETTLED_AFTER),
                shard=self._shard, seconds=moved.total_seconds(),
            )  # fmt: skip
        elif now - jump.noticed >= FOLLOWED_AFTER:
            self._follow(found, moved, jump.noticed)

    def _follow(self, found: timedelta, moved: timedelta, noticed: datetime) -> None:
        ahead = self.ahead + moved
        self.ahead, self._settles_at = (ahead, noticed + SETTLED_AFTER) if ahead > SLIGHT else (_NONE, datetime.min)
        self._jump = None
        self._set(found)
        logger.warning(
            "shard %s: following the jump of the database clock by %s", self._shard, _in_seconds(moved),
            shard=self._shard, seconds=moved.total_seconds(),
        )  # fmt: skip

    def _set(self, offset: timedelta) -> None:
        self._offset_us = offset // _MICROSECOND


def _in_seconds(difference: timedelta) -> str:
    """Return a difference of two clocks for the log, in whole seconds."""
    return format_duration(timedelta(seconds=round(difference.total_seconds())))
