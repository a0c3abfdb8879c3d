"""Ports: what the dispatcher gets from its shard, and the protocols by which it calls the shard."""

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
    """The parts of a shard that handling needs, which do not change while the shard runs."""

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
    """The process to which the note is addressed; empty for all processes."""
    rows: int = 0
    """In an offer: how many rows of the sender wait for a free run."""
    free: int = 0
    """In a request, above 0: how many rows the sender could start now."""
    partition: int = 0
    """In a request: the partition to move the rows into."""


class LockTrust(Protocol):
    """The lock manager, as dispatch uses it."""

    def suspect(self, lease: Lease) -> None:
        """Release and reacquire the lock of a lease, because the database rejected an outcome under it."""

    def look_for_proof(self) -> None:
        """Process a proof that a thread has made while the event loop was blocked."""


class WakeUps(Protocol):
    """The shard, as dispatch uses it to wake loops here and in other processes."""

    def committed(self) -> None:
        """Events that handlers emitted were committed."""

    def unblocked(self) -> None:
        """BLOCKED notifications became due. Another process may hold their slot."""

    def moved(self) -> None:
        """Notifications became due in a partition of any process, behind its scan position."""

    def send_note(self, note: WorkNote) -> None:
        """Send a note to other processes. It may be lost."""


class StuckRows:
    """The ids of the notifications of stuck runs. No run of such a notification starts in this process.

    The object outlives a shard run, because a run that is stuck when ``running()`` is left may still be active when it
    is entered again.
    """

    def __init__(self, finished_late: Callable[[], None]) -> None:
        """``finished_late`` is called when a stuck run has ended, so that its rows may run again."""
        self.ids: set[UUID] = set()
        self._finished_late = finished_late

    def add(self, ids: Iterable[UUID]) -> None:
        """Add the rows of a run that is stuck."""
        self.ids.update(ids)

    def discard(self, ids: Collection[UUID]) -> None:
        """Remove the rows of a stuck run that has ended."""
        self.ids.difference_update(ids)
        self._finished_late()
