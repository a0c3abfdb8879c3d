"""Time: naive UTC with microseconds, and the one place where local clocks are corrected."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

Clock = Callable[[], datetime]
"""Answers with the present moment, naive UTC."""


def utc_now() -> datetime:
    """The present moment of this machine, naive UTC with microseconds."""
    return from_micros(time.time_ns() // 1000)  # two thirds of what it takes to make an aware one naive


EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)


def as_micros(moment: datetime) -> int:
    """A naive UTC moment as microseconds since 1970."""
    return (moment - EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """The naive UTC moment so many microseconds after 1970."""
    return EPOCH + timedelta(microseconds=micros)


def naive_utc(moment: datetime) -> datetime:
    """The same moment as naive UTC; a naive ``moment`` is taken to be UTC already."""
    return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)


class ShardClock:
    """The clock of one shard: this machine's, corrected by how far the database's clock is ahead of it.

    The database decides what time it is, so that hosts whose clocks differ by minutes agree on what is due.
    A clock that the application gave (``Outbox(clock=...)``) is taken as it is and never corrected.
    """

    def __init__(self, given: Clock | None) -> None:
        self._given = given
        self.offset = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.offset if self._given is None else naive_utc(self._given())

    def correct(self, database_now: datetime, asked: datetime, answered: datetime) -> None:
        """Take over the database's clock, read at some time between two local moments.

        An offset that may still be right stays. So a slow answer, of which nobody knows when it was read, does not move
        the clock, and what was due stays due.
        """
        least, most = database_now - answered, database_now - asked
        if not least <= self.offset <= most:
            self.offset = least + (most - least) / 2
