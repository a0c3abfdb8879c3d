"""Advice about partitions that work, and are probably not what was meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outboxio.handlers.handler import Handler
from outboxio.operations.partitions.owners import counts_of
from outboxio.storage.protocols import Database

_SHARE_OF_LOCKS = 4  # the applications of a server share its locks, and a statement needs some for each table


async def advice_on_partitions(database: Database, namespace: str, handlers: Iterable[Handler]) -> list[str]:
    """Sentences for an operator: too many locks for the server, and limits that count for each process."""
    registered = list(handlers)
    return [*await _too_many_locks(database, namespace, registered), *_small_concurrency(database, registered)]


async def _too_many_locks(database: Database, namespace: str, handlers: list[Handler]) -> list[str]:
    room = await database.lock_room()
    if room is None:
        return []
    locks = {one.handler_name: one.active for one in (await counts_of(database, namespace)).values()}
    for handler in handlers:
        for name in handler.names:
            locks[name] = max(locks.get(name, 1), handler.options.partitions if name == handler.name else 1)
    needed = sum(locks.values()) + 1  # fan-out
    if needed * _SHARE_OF_LOCKS <= room:
        return []
    return [
        f"the partitions of all handlers need {needed:,} locks, and the server has room for {room:,}, for all "
        "applications together: raise max_locks_per_transaction (the server restarts), or use fewer partitions; a "
        'statement that finds no room fails with "out of shared memory"'
    ]


def _small_concurrency(database: Database, handlers: list[Handler]) -> Iterator[str]:
    if database.partitions is None:
        return
    for handler in handlers:
        limit, partitions = handler.options.concurrency, handler.options.partitions
        if limit is not None and limit < partitions and handler.options.total_concurrency is None:
            yield (
                f"handler {handler.name!r} has concurrency={limit} and partitions={partitions}: each process runs up "
                f"to {limit} at once, so up to {limit * partitions} in {partitions} processes; a limit for all "
                "processes together is total_concurrency"
            )
