"""Finds two shards that are the same database: each shard tries the same lock, which has a random name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outboxio.errors import SameDatabase
from outboxio.model.lock_name import LockName
from outboxio.runtime.shard import ShardRuntime
from outboxio.storage.protocols import ClusterLock
from outboxio.support import machine
from outboxio.support.aio import to_the_end

_HEARTBEAT = 10.0  # seconds, far longer than the probe takes


async def refuse_same_database(shards: Sequence[ShardRuntime]) -> None:
    """Raise :class:`SameDatabase` if a shard cannot take the lock, because a shard before has taken the lock."""
    if len(shards) < 2:
        return
    probe = LockName(machine.token(16), "probe")
    locks = [(s, s.database.cluster_lock(s.environment.owner, None, _HEARTBEAT)) for s in shards]
    try:
        held: list[str] = []
        for shard, lock in locks:
            if not await lock.try_probe(probe):
                raise SameDatabase(held[-1], shard.name)
            held.append(shard.name)
    finally:
        await to_the_end(_close_all(lock for _, lock in locks))


async def _close_all(locks: Iterable[ClusterLock]) -> None:
    for lock in locks:
        await lock.close()
