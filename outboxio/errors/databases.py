"""Errors of databases, and of work that did not end in time."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outboxio.errors.root import OutboxError


class DatabaseError(OutboxError):
    """The database or the network failed. ``__cause__`` is the exception of the driver."""


class DatabaseUnavailable(DatabaseError):
    """A database cannot be reached, does not answer any more, or is read-only at present."""

    _failed = "cannot be reached"

    def __init__(self, shard: str, where: str, reason: str) -> None:
        self.shard = shard
        self.where = where
        self.reason = reason
        super().__init__(f"shard {shard!r} at {where} {self._failed}: {reason}")


class PoolExhausted(DatabaseUnavailable):
    """All connections of a pool were in use for the setting ``pool_timeout``. The action was not begun.

    On SQLite the writing connection is a pool of size 1. ``held``: the seconds since the longest-used connection was
    taken; ``None`` if the pool is the application's.
    """

    _failed = "has no connection left"

    def __init__(self, shard: str, where: str, *, size: int, in_use: int, held: float | None, timeout: float) -> None:
        self.size = size
        self.in_use = in_use
        self.held = held
        self.timeout = timeout
        longest = "" if held is None else f", one of them for {held:.1f} s"
        super().__init__(
            shard,
            where,
            f"{in_use} of at most {size} connections for actions are in use{longest}, and none came back within "
            f"pool_timeout, {timeout:g} s. An action that waits for another service or for a lock keeps its "
            "connection: shorten such actions, run fewer at once, or raise pool_timeout",
        )


class DrainTimeout(OutboxError, TimeoutError):
    """``drain`` still found due work at the timeout."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        super().__init__(
            f"shard {shard!r} still has due work after the timeout of drain(): handlers take longer, or another "
            "process holds the locks and is not through yet"
        )


class ShutdownError(OutboxError):
    """Outcomes could not be written within the setting ``shutdown_timeout``. The handlers will run again."""

    def __init__(self, notification_ids: Sequence[UUID]) -> None:
        self.notification_ids = tuple(notification_ids)
        ids = ", ".join(str(i) for i in self.notification_ids)
        super().__init__(
            f"{len(self.notification_ids)} outcomes could not be written before shutdown_timeout; these handlers have "
            f"run and will run again: {ids}"
        )
