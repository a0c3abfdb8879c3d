"""Access to private parts of an outbox that the command line needs: shards, handlers and counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from outboxio.cli.output import actor
from outboxio.errors import UnknownHandler
from outboxio.handlers.handler import Handler
from outboxio.health.notices import Deliver, FindingWatch
from outboxio.health.values import Health
from outboxio.model.event import Event, EventTypes, type_name, with_subclasses
from outboxio.operations.admin import Admin
from outboxio.operations.arguments import RequestedTypes, handler_argument
from outboxio.outbox import Drained, Outbox
from outboxio.runtime.running import finding_watches
from outboxio.runtime.shard import ShardRuntime
from outboxio.runtime.shard_run import ShardRun
from outboxio.storage.protocols import Database

# pyright: reportPrivateUsage=false


def databases(outbox: Outbox) -> Mapping[str, Database]:
    """Return the database of each shard."""
    return {name: shard.database for name, shard in _shards(outbox).items()}


def clock_of(outbox: Outbox, shard: str) -> Callable[[], datetime]:
    """Return the clock by which notifications of a shard become due."""
    return _shards(outbox)[shard].clock


def handlers(outbox: Outbox) -> Sequence[Handler]:
    return list(outbox._handlers)


def schedules(outbox: Outbox) -> Mapping[str, str]:
    """Return the schedule of each job, by name."""
    return {job.name: job.schedule for job in outbox._jobs.values()}


def run_only(outbox: Outbox, names: Sequence[str]) -> None:
    """Run only these handlers. Raises :class:`UnknownHandler` for a name that no handler has, not even as an alias."""
    for name in names:
        if outbox._handlers.find(name) is None:
            raise UnknownHandler(name, outbox.namespace, outbox._handlers.names)
    outbox._handlers.run_only(names)


def handlers_to_run(outbox: Outbox) -> Sequence[Handler]:
    return outbox._handlers.to_run


def registered_types(outbox: Outbox) -> EventTypes:
    return outbox._types


def types_of(outbox: Outbox) -> Mapping[str, type]:
    """Return the registered event classes, by stored name."""
    known = {cls for handler in handlers(outbox) for cls in handler.accepts()}
    known |= {cls for cls in with_subclasses(Event) if cls is not Event}
    return {type_name(cls): cls for cls in known}


async def refuse_unknown_handler(
    outbox: Outbox, handler: str, *, types: Sequence[str] = (), among_rows: bool = False
) -> None:
    """Raise the error of an operation for a misspelled handler or event type. For dry runs.

    ``among_rows``: accept a name that only finished notifications have.
    """
    admin, name, requested = outbox.admin, handler_argument(handler), RequestedTypes(types)
    databases = admin._shards.databases(None)
    await admin._known.refuse_unknown(name, databases, among_rows=among_rows)
    await admin._known.refuse_unknown_types(requested, name, databases)


def admin_of(outbox: Outbox) -> Admin:
    """Return the admin whose operations are recorded with the user of this machine."""
    return outbox.admin.by(actor(), origin="cli")


async def now_of(outbox: Outbox) -> datetime:
    """Return the current time of the databases; the earliest, if there are several."""
    return min([await one.now() for one in outbox.admin._shards.chosen(None)])


async def is_live(outbox: Outbox) -> bool:
    """True if this process does not need a restart. Does not query the database."""
    return (await outbox._health.probe(queries_database=False)).live


async def health_of(outbox: Outbox, patience: float) -> Health:
    """Read the health of the tables, with ``patience`` seconds for the first connection."""
    return await outbox._health.read(patience)


def finding_watch(outbox: Outbox, receiver: str, deliver: Deliver, **options: Any) -> FindingWatch:
    """Return a watch that notifies a receiver of findings. ``options``: of :class:`FindingWatch`."""
    [watch] = finding_watches(list(_shards(outbox).values()), {receiver: deliver}, **options)
    return watch


class Tally:
    """The counts of an outbox. Create it inside ``running()``; it keeps the counts afterwards."""

    def __init__(self, outbox: Outbox) -> None:
        self._works: list[ShardRun] = [shard.work for shard in _shards(outbox).values() if shard.work is not None]

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
