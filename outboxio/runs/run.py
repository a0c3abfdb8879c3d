"""Runs: a run is a call of a handler for a notification or a batch, or a call of the hooks of a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from outboxio.errors import Unavailable
from outboxio.model.notification import PENDING, Notification
from outboxio.model.outcome import Lease, Verdict
from outboxio.storage.protocols import Session
from outboxio.support.log import Fields

if TYPE_CHECKING:
    from outboxio.runs.handler_queue import HandlerQueue


class Phase(IntEnum):
    """How a run that has started is to end. After a phase above OVERDUE the worker takes no further run."""

    RUNNING = 0
    """The handler may take its time."""
    OVERDUE = 1
    """The handler was cancelled at its deadline."""
    INTERRUPTED = 2
    """The handler was cancelled because the process shuts down. The run uses up no attempt."""
    STUCK = 3
    """The handler ignores its cancellation for longer than its grace period. The result of the run is refused."""


RUNNING, OVERDUE, INTERRUPTED, STUCK = Phase.RUNNING, Phase.OVERDUE, Phase.INTERRUPTED, Phase.STUCK


class Run(Struct, eq=False, gc=False):
    """A notification on the way through a handler."""

    notification: Notification
    queue: HandlerQueue
    lease: Lease
    key: str | None = None
    """The ordering key, if the handler is ordered."""
    started: float = 0.0
    """When the handler's time began, by the event loop's clock. 0.0 while the handler's time does not count."""
    phase: Phase = RUNNING
    cancelled_at: float | None = None
    """When the handler was cancelled, by the event loop's clock."""
    is_clean: bool = True
    """False if the handler left context variables behind that the next event would find."""
    has_begun: bool = False
    """True if the start of an at-most-once run is committed: the handler must not be called again."""
    is_settled: bool = False
    """True if the outcome is committed already, together with the rows that the handler wrote."""
    session: Session | None = None
    """The transaction in which the handler works, if the handler is transactional."""
    verdict: Verdict | None = None
    """The verdict on the notification, if the hooks of the verdict are owed."""
    is_undecodable: bool = False
    """True if the event could not be decoded, so that the handler was not called."""
    task: asyncio.Task[None] | None = None
    unavailable: Unavailable | None = None
    """The error with which the handler has said that a service is away: the run is made again after a rest."""

    @property
    def undone(self) -> Iterable[Run]:
        """The rows of this call that have no outcome yet."""
        return (self,)

    @property
    def log_fields(self) -> Fields:
        """The fields of a log entry about the run. A run of many rows has only the handler."""
        return {**self.notification.log_fields, "handler": self.queue.handler.name}

    @property
    def interrupted(self) -> bool:
        """True if shutdown has cancelled the handler."""
        return self.phase is INTERRUPTED

    @property
    def abandoned(self) -> bool:
        """True if the run was given up as stuck."""
        return self.phase is STUCK

    def exceed_deadline(self, now: float) -> None:
        """The handler is cancelled because the time is over."""
        self.phase, self.cancelled_at = OVERDUE, now

    def interrupt(self) -> None:
        """The handler is cancelled because the process shuts down."""
        self.phase, self.cancelled_at = INTERRUPTED, 0.0

    def give_up(self) -> None:
        """The handler ignores the cancellation."""
        self.phase = STUCK

    def go_on(self) -> None:
        """The next part of a call begins. The former part exceeded the deadline."""
        self.phase, self.cancelled_at = RUNNING, None

    def begin_again(self) -> None:
        """The run waits for a new start, as if no run had been made."""
        self.go_on()
        self.started, self.is_clean = 0.0, True
        self.session = self.task = self.unavailable = None

    def precedes(self, beginning: datetime) -> bool:
        """True if the event is older than ``beginning`` and no run was made for the notification yet."""
        notification = self.notification
        is_untouched = notification.state == PENDING and not notification.attempts
        return is_untouched and notification.context.event_date < beginning


class HookRun(Run, eq=False, gc=False):
    """A call of the hooks that are owed for a verdict. A hook run takes no worker from the handler's own runs."""


class BatchRun(Run, eq=False, kw_only=True, gc=False):
    """A call of a handler for many notifications, and the smaller calls into which a failed call is split."""

    remaining: dict[Run, None]
    parts: list[list[Run]]
    """The rows of the calls that are still to be made. The next call comes last."""
    broken: set[str] = msgspec.field(default_factory=set[str])
    """Ordering keys of which a row has ended without success: the later rows of the key leave the batch untouched."""

    @classmethod
    def of(cls, rows: list[Run]) -> BatchRun:
        first = rows[0]
        return cls(first.notification, first.queue, first.lease, remaining=dict.fromkeys(rows), parts=[rows])

    @property
    def undone(self) -> Iterable[Run]:
        return tuple(self.remaining)

    @property
    def log_fields(self) -> Fields:
        return {"handler": self.queue.handler.name, "batch_size": len(self.remaining)}
