"""The state that all parts of a dispatcher share: how much goes on, and if runs may start."""

from __future__ import annotations

import asyncio
import contextvars

from outboxio.loops.signals import Signals
from outboxio.model.envelope import begin_inside
from outboxio.runs.ports import LockTrust
from outboxio.statistics.figures import Counters
from outboxio.support.aio import Alarm
from outboxio.telemetry.protocol import HandlingTelemetry


class DispatchState:
    """Counts of ready and running rows, and the permission to start runs.

    A run may start while the dispatcher is not stopping and the cluster locks are proven. The lock manager says until
    which moment the locks are proven (:attr:`proven_until`, by the event loop's clock).
    """

    def __init__(self, signals: Signals, locks: LockTrust, telemetry: HandlingTelemetry | None = None) -> None:
        self.signals = signals
        self.locks = locks
        self.counters = Counters()
        self.ready = 0
        """Runs and hook runs that are ready; a batch counts as one run."""
        self.running = 0
        self.hooks = 0
        """Hook runs that go on."""
        self.ended = 0
        """How many runs and hook runs have ended. A run that was given up as stuck has not ended."""
        self.finding = asyncio.Lock()
        """Held by the find round under way."""
        self.quiet = asyncio.Event()
        """Set while nothing is ready and nothing runs."""
        self.quiet.set()
        self.find_alarm = Alarm(signals.find.set)
        """Begins a find round at a later moment."""
        self.is_stopping = False
        self.proven_until = float("inf")
        self.handlers_context = contextvars.copy_context()
        """The context variables with which each task that calls handlers begins."""
        self.handlers_context.run(begin_inside)
        if telemetry is not None:
            self.handlers_context.run(telemetry.begin)

    def may_start(self, now: float) -> bool:
        """True if runs may start."""
        return not self.is_stopping and self.is_proven(now)

    def is_proven(self, now: float) -> bool:
        """True if the locks are proven. A thread may have proven the locks while the event loop was blocked."""
        if now > self.proven_until:
            self.locks.look_for_proof()
        return now <= self.proven_until

    @property
    def is_busy(self) -> bool:
        """True if a run is ready or goes on."""
        return bool(self.running or self.ready or self.hooks)

    @property
    def nothing_follows(self) -> bool:
        """True if no further outcomes are to be expected soon."""
        return not (self.running or self.ready or self.hooks or self.finding.locked())

    def set_if_quiet(self) -> None:
        if not self.is_busy:
            self.quiet.set()
