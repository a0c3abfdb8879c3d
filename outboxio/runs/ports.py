"""Ports: the parts of a shard that the dispatcher is made from, and the protocols by which the dispatcher answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.options import DeadHook
from outboxio.model.envelope import HandlerContext
from outboxio.model.outcome import Lease
from outboxio.settings import Settings
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage.protocols import Database
from outboxio.support.clock import ShardClock


class HandlingSetup(Struct, frozen=True):
    """The parts of a shard that handling needs and that never change while the shard runs."""

    database: Database
    handlers: HandlerRegistry
    clock: ShardClock
    settings: Settings
    context: HandlerContext
    on_dead: DeadHook | None = None
    statistics: ShardStatistics = msgspec.field(default_factory=ShardStatistics)

    @property
    def namespace(self) -> str:
        return self.context.namespace


class WorkNote(Struct, frozen=True, omit_defaults=True):
    """A message between processes about the ready rows of a handler (``dispatch/transfers.py``)."""

    handler_name: str
    to: str = ""
    """The process that should read the note; empty for all processes."""
    rows: int = 0
    """In an offer: the rows that wait in the sender for a run."""
    free: int = 0
    """In a request, above 0: the rows that the sender could start now."""
    partition: int = 0
    """In a request: the partition into which the rows should be moved."""


class LockTrust(Protocol):
    """The lock manager, for dispatch."""

    def suspect(self, lease: Lease) -> None:
        """Prove the lock of a lease before the next heartbeat: the database has refused an outcome under this lease."""

    def look_for_proof(self) -> None:
        """Take in a proof that a thread has made while the event loop was blocked."""


class WakeUps(Protocol):
    """The shard, for dispatch: the shard wakes the loops of this process and of all processes."""

    def committed(self) -> None:
        """Handlers have emitted events, and the events are committed."""

    def unblocked(self) -> None:
        """BLOCKED notifications became due. Another process may hold the lock of the handler."""

    def moved(self) -> None:
        """Notifications became due in a partition of any process, behind the rows that the process has read."""

    def send_note(self, note: WorkNote) -> None:
        """Send a note to other processes. It may be lost."""


class StuckRows:
    """The ids of the notifications of stuck runs. No run of such a notification starts in this process.

    The object outlives a shard run: a run that is stuck when the outbox is left may still go on when the outbox runs
    again.
    """

    def __init__(self, came_back: Callable[[], None]) -> None:
        """``came_back`` is called when a stuck run has ended: the rows may run again."""
        self.ids: set[UUID] = set()
        self._came_back = came_back

    def add(self, ids: Iterable[UUID]) -> None:
        """The run of the rows is stuck."""
        self.ids.update(ids)

    def discard(self, ids: Collection[UUID]) -> None:
        """The stuck run of the rows has ended."""
        self.ids.difference_update(ids)
        self._came_back()
