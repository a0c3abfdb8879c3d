"""A proof that the session with the cluster locks lives, with the time of the database's clock."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime

from msgspec import Struct

from outboxio.support import machine
from outboxio.support.clock import steady_now


class Proof(Struct, frozen=True):
    """An answered heartbeat: the sending time, and the database's time between two times of this process."""

    sent_at: float
    """By ``machine.monotonic()``, which all threads share."""
    database_now: datetime
    asked: datetime
    answered: datetime


async def measured(asking: Awaitable[datetime]) -> Proof:
    """Ask the database for the time. Only this function compares this machine's clock with the database's clock."""
    sent_at, asked = machine.monotonic(), steady_now()
    database_now = await asking
    return Proof(sent_at, database_now, asked, steady_now())
