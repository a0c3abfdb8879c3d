"""The shards that an operator's order reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from msgspec import Struct

from outboxio.actions.nesting import refuse_in_transaction
from outboxio.errors import ConfigurationError
from outboxio.storage.protocols import Database
from outboxio.support.clock import ShardClock
from outboxio.support.text import briefly

_TICK = timedelta(microseconds=1)


class AdminShard(Struct, frozen=True):
    """A shard, as an operator sees the shard."""

    database: Database
    clock: ShardClock
    wake: Callable[[], None]
    """Tell the loops, here and in other processes, that notifications became due, or ended."""
    partitions_changed: Callable[[], None]
    """Tell the loops, here and in other processes, that a number of partitions has changed."""
    operation_ordered: Callable[[UUID], None]
    """Have this process carry an operation out in the background, if this process is in ``running()``."""

    async def measure(self) -> None:
        """Ask the database for the time, because the clock of an operator's machine may be wrong."""
        await self.clock.measure(self.database.now)

    async def now(self) -> datetime:
        """The present moment by the database's clock."""
        await self.measure()
        return self.clock()


class Ends:
    """The moments before which notifications match a bulk order: each later than all before, on each shard.

    A clock of a test may stand still. Then the notifications of one order still match the next order.
    """

    def __init__(self) -> None:
        self._latest: dict[str, datetime] = {}

    def next(self, shard: str, now: datetime) -> datetime:
        """A moment after ``now``: notifications that have changed at this very moment match."""
        latest = max(now, self._latest.get(shard, now)) + _TICK
        self._latest[shard] = latest
        return latest


class AdminShards:
    """All shards of an outbox."""

    def __init__(self, shards: Mapping[str, AdminShard], owner: object) -> None:
        """``owner``: the outbox, whose transactions would block an order on a database with a single writer."""
        self._shards = shards
        self._owner = owner

    def chosen(self, shard: str | None) -> Sequence[AdminShard]:
        """The shard of this name, or all shards. Raises :class:`ConfigurationError` for an unknown name."""
        if shard is None:
            return tuple(self._shards.values())
        found = self._shards.get(shard) if isinstance(shard, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        if found is None:
            shards = ", ".join(map(repr, self._shards))
            raise ConfigurationError(f"there is no shard {briefly(shard)}; the shards are {shards}")
        return [found]

    def databases(self, shard: str | None) -> Sequence[Database]:
        return [reached.database for reached in self.chosen(shard)]

    def to_write(self, call: str, shard: str | None) -> Sequence[AdminShard]:
        """The chosen shards. Raises :class:`WaitsForItself` inside a transaction on a database with a single writer."""
        chosen = self.chosen(shard)
        remedy = "this database has one writer; call it when the transaction has ended"
        names = [reached.database.name for reached in chosen if reached.database.has_one_writer]
        refuse_in_transaction(self._owner, call, remedy, names)
        return chosen
