"""What the command line must know of an outbox that applications need not: its shards, handlers and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outboxio.handler import Handler
from outboxio.outbox import Drained, Outbox
from outboxio.shard import ShardRuntime, ShardWork
from outboxio.storage.protocols import Database

# pyright: reportPrivateUsage=false


def databases(outbox: Outbox) -> Mapping[str, Database]:
    """The database of each shard."""
    return {name: shard.database for name, shard in _shards(outbox).items()}


def handlers(outbox: Outbox) -> Sequence[Handler]:
    return list(outbox._handlers)


class Tally:
    """What an outbox does while it runs. Made inside ``running()``, it can still be asked afterwards."""

    def __init__(self, outbox: Outbox) -> None:
        self._works: list[ShardWork] = [shard.work for shard in _shards(outbox).values() if shard.work is not None]

    def total(self) -> Drained:
        counters = [work.counters for work in self._works]
        return Drained(
            fanned_out=sum(work.fanout.events for work in self._works),
            succeeded=sum(c.succeeded for c in counters),
            failed=sum(c.failed for c in counters),
            expired=sum(c.expired for c in counters),
            dead=sum(c.dead for c in counters),
        )


def _shards(outbox: Outbox) -> Mapping[str, ShardRuntime]:
    return outbox._shards
