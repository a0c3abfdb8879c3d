"""Time: naive UTC with microseconds, by the clock of the database.

Between two questions to the database, the steady clock of this machine carries the answer on. No user and no time
service can set a steady clock, so a step of the machine's wall clock has no effect.

The clock of the database can jump, too, for some seconds or for good. The steady clock shows such a jump. Outboxio
follows the jump in two steps:

* Reversible decisions, such as the moment at which a row is due, follow after 1 minute (``FOLLOWED_AFTER``).
* Irreversible decisions follow after 10 minutes (``SETTLED_AFTER``, :meth:`ShardClock.settled`): a row expires, a
  handler counts as gone, old rows are removed.
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
"""Returns the present moment, naive UTC."""

SLIGHT = timedelta(minutes=1)  # a smaller difference is corrected at once; a larger difference is a jump
FOLLOWED_AFTER = timedelta(minutes=1)  # the time that a jump must last before rows are due by the new time
SETTLED_AFTER = timedelta(minutes=10)  # the time that a jump must last before rows expire or are removed
FRESH = timedelta(minutes=1)  # the age of an answer after which the database is asked again
_NONE = timedelta()


def utc_now() -> datetime:
    """The present moment by the wall clock of this machine, naive UTC with microseconds."""
    return from_micros(machine.time_ns() // 1000)  # takes two thirds of the time of datetime.now(UTC).replace(...)


EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)


def as_micros(moment: datetime) -> int:
    """A naive UTC moment as microseconds since 1970."""
    return (moment - EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """The naive UTC moment ``micros`` microseconds after the beginning of 1970."""
    return EPOCH + timedelta(microseconds=micros)


def naive_utc(moment: datetime) -> datetime:
    """The same moment as naive UTC; a naive ``moment`` counts as UTC.

    Applications spell "for ever" as the first or last moment of the calendar in a local time zone. In UTC such a moment
    may lie outside of the calendar. Then the result is the first or last moment of the calendar.
    """
    if moment.tzinfo is None:
        return moment
    try:
        return moment.astimezone(UTC).replace(tzinfo=None)
    except OverflowError:
        return datetime.min if moment.year == 1 else datetime.max


def steady_now() -> datetime:
    """The present moment of a clock that cannot be set. Only the difference of two such moments has a meaning."""
    return from_micros(machine.steady_ns() // 1000)


class _Jump(Struct, frozen=True):
    """The offset after a jump of the database's clock, and the moment of the discovery, by the steady clock."""

    offset: timedelta
    noticed: datetime


class ShardClock:
    """The clock of a shard: the time of the database, carried on by the steady clock of this machine.

    Machines with wall clocks that differ by minutes so agree on due rows. Until the first answer of the database, the
    wall clock of this machine counts. A clock of the application (``Outbox(clock=...)``) is never corrected.
    """

    def __init__(self, given: Clock | None, shard: str = "default") -> None:
        self._given = given
        self._shard = shard
        self._offset_us: int | None = None
        self._asked = datetime.min
        self._jump: _Jump | None = None
        self._settles_at = datetime.min
        self.ahead = _NONE
        """The time by which :meth:`settled` is behind, because a jump has not lasted long enough."""

    @property
    def is_given(self) -> bool:
        """True if the clock is the application's, so that the database is not asked."""
        return self._given is not None

    def __call__(self) -> datetime:
        offset = self._offset_us
        if offset is not None:
            return EPOCH + timedelta(microseconds=machine.steady_ns() // 1000 + offset)
        return utc_now() if self._given is None else naive_utc(self._given())

    def settled(self) -> datetime:
        """The time for irreversible decisions, never later than the time of the clock.

        After a jump of the database's clock into the future, the result continues the old time until the new time has
        lasted for 10 minutes (``SETTLED_AFTER``).
        """
        return self() - self.ahead

    @property
    def offset(self) -> timedelta | None:
        """The difference to the steady clock; ``None`` until the first answer of the database."""
        return None if self._offset_us is None else timedelta(microseconds=self._offset_us)

    async def measure(self, ask: Callable[[], Awaitable[datetime]]) -> None:
        """Ask the database for the time, unless the last answer is younger than 1 minute (``FRESH``)."""
        if self._given is None and steady_now() - self._asked > FRESH:
            asked = steady_now()
            self.correct(await ask(), asked, steady_now())

    def correct(self, database_now: datetime, asked: datetime, answered: datetime) -> None:
        """Follow the clock of the database, which was read between two moments of :func:`steady_now`.

        A slow answer was read at an unknown moment. So the present offset stays if the answer allows it, and due rows
        stay due. A jump is followed only after it has lasted for 1 minute.
        """
        if self._given is not None:
            return
        least, most = database_now - answered, database_now - asked
        found, offset = least + (most - least) / 2, self.offset
        if offset is None:
            self._begin(found, answered)
        elif least <= offset <= most:
            self._keep(offset)
        elif abs(found - offset) <= SLIGHT:
            self._keep(found)
        else:
            self._doubt(found, found - offset, answered)
        self._asked = answered
        if self.ahead and answered >= self._settles_at:
            logger.warning("the clock of shard %s is believed in everything again", self._shard, shard=self._shard)
            self.ahead = _NONE

    def _begin(self, found: timedelta, now: datetime) -> None:
        """Follow the first answer; irreversible decisions wait if the wall clock of this machine contradicts."""
        self._set(found)
        ahead = now + found - utc_now()
        if ahead > SLIGHT:
            self.ahead, self._settles_at = ahead, now + SETTLED_AFTER
            logger.warning(
                "the database's clock of shard %s is %s ahead of this host's wall clock, and one of the two is wrong; "
                "outboxio goes by the database's, but for %s nothing expires, is removed or counts as gone by the "
                "difference", self._shard, _in_seconds(ahead), format_duration(SETTLED_AFTER),
                shard=self._shard, seconds=ahead.total_seconds(),
            )  # fmt: skip

    def _keep(self, offset: timedelta) -> None:
        if self._jump is not None:
            logger.warning(
                "the database's clock of shard %s is back; its jump had no effect", self._shard, shard=self._shard
            )
            self._jump = None
        self._set(offset)

    def _doubt(self, found: timedelta, moved: timedelta, now: datetime) -> None:
        """Remember a jump of the database's clock, and follow the jump after 1 minute (``FOLLOWED_AFTER``)."""
        jump = self._jump
        if jump is None or abs(found - jump.offset) > SLIGHT:
            self._jump = _Jump(found, now)
            logger.warning(
                "the database's clock of shard %s jumped by %s; outboxio goes on by the time as it was, until the new "
                "time has lasted for %s, and for %s nothing expires, is removed or counts as gone by it",
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
            "the database's clock of shard %s has moved by %s for good", self._shard, _in_seconds(moved),
            shard=self._shard, seconds=moved.total_seconds(),
        )  # fmt: skip

    def _set(self, offset: timedelta) -> None:
        self._offset_us = offset // _MICROSECOND


def _in_seconds(difference: timedelta) -> str:
    """A difference of two clocks for the log, in whole seconds."""
    return format_duration(timedelta(seconds=round(difference.total_seconds())))
