"""The loops of a shard run: which rounds they drive, how often, and woken by which signal."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

from msgspec import Struct

from outboxio.dispatch.dispatcher import Dispatcher
from outboxio.fanout.fanout import Fanout
from outboxio.jobs.scheduler import JobScheduler
from outboxio.loops.loop import NEVER, Loop, PollSchedule, Signals
from outboxio.operations.retention import Housekeeping
from outboxio.operations.takeover import CHECK_DELAY, Takeover
from outboxio.runtime.environment import Roles
from outboxio.runtime.lock_manager import LockManager
from outboxio.runtime.membership import DECISIONS_DELAY, Membership
from outboxio.runtime.reporting import RunReporting
from outboxio.runtime.shard import ShardRuntime
from outboxio.runtime.wakeups import LONGEST_GAP
from outboxio.support.aio import Signal
from outboxio.telemetry.protocol import Round

HOUSEKEEPING_DELAY = 30.0
QUICKEST_FANOUT = 0.002  # seconds: under steady load events come all the time
FIGURES_DELAY = 15.0  # seconds between two reads of the figures for metrics
SETTLE_DELAY = 1.0


class Services(Struct, frozen=True):
    """The services whose rounds the loops drive."""

    locks: LockManager
    membership: Membership
    fanout: Fanout
    dispatcher: Dispatcher
    housekeeping: Housekeeping
    takeover: Takeover
    reporting: RunReporting
    jobs: JobScheduler
    announce: Round
    """Announces the handlers, and reads the decisions of operators."""
    fans_out: Callable[[], bool]
    """True if this process fans out."""


class RunLoops:
    """A loop for each service of a shard run."""

    def __init__(self, shard: ShardRuntime, signals: Signals, roles: Roles, services: Services) -> None:
        name, settings, statistics = shard.name, shard.environment.settings, shard.statistics
        watched = partial(
            shard.environment.telemetry.chosen.round, namespace=shard.environment.namespace, shard=shard.name
        )
        locks, membership, dispatcher, jobs = services.locks, services.membership, services.dispatcher, services.jobs
        housekeeping, reporter = services.housekeeping, services.reporting.reporter
        self._roles = roles
        self._purges = settings.purge_enabled
        # If the database sends no wake-ups between processes, the loops poll quickly while there is traffic. The find
        # loop need not if this process fans out and owns all partitions, because fan-out wakes it. But nothing wakes
        # it for a row that waits for a row of another process.
        eager = 0.0 if shard.database.wakes_across_processes else NEVER
        of_fanout = PollSchedule(
            _seconds(settings.fanout_poll_delay), eager_for=lambda: max(eager, LONGEST_GAP), quickest=QUICKEST_FANOUT,
            woken_within=LONGEST_GAP,
        )  # fmt: skip
        of_finding = PollSchedule(
            _seconds(settings.handling_poll_delay),
            eager_for=lambda: 0.0 if services.fans_out() and not dispatcher.waits_for_others else eager,
        )

        def loop(work: str, run_once: Round, schedule: PollSchedule, signal: Signal | None = None) -> Loop:
            statistics.expect_loop(work)
            return Loop(
                f"{work} of {name}", run_once, schedule, signal=signal, failed=partial(statistics.loop_failed, work)
            )

        self.locks = loop("locks", locks.run_once, PollSchedule(locks.poll_delay), signals.locks)
        self.share = loop("shared handlers", membership.look_once, PollSchedule(membership.look_delay), signals.share)
        self.announce = loop("subscriptions", services.announce, every(DECISIONS_DELAY))
        self.fanout = loop("fan-out", watched("fanout", services.fanout.run_once), of_fanout, signals.fan_out)
        self.find = loop("dispatch", dispatcher.find_once, of_finding, signals.find)
        settle_once = watched("settle", dispatcher.settle_once)
        self.settle = loop("outcomes", settle_once, every(SETTLE_DELAY), signals.settle)
        self.housekeeping = loop("housekeeping", housekeeping.run_once, every(HOUSEKEEPING_DELAY))
        self.takeover = services.takeover
        self.operations = loop("operations", self.takeover.run_once, every(CHECK_DELAY))
        purge = watched("purge", housekeeping.purge)
        self.retention = loop("retention", purge, PollSchedule(housekeeping.purge_delay))
        self.reports = loop("reports", reporter.run_once, every(reporter.delay))
        self.jobs = loop("jobs", jobs.run_once, PollSchedule(jobs.delay), signals.jobs) if jobs.locks else None
        self.figures = loop("figures", services.reporting.read_figures, every(FIGURES_DELAY))

    def began_to_fan_out(self) -> None:
        """Wake the loops that only work in the process that fans out, because this process is now that process."""
        for loop in (self.retention, self.operations, self.figures):
            loop.wake()

    @property
    def all(self) -> list[Loop]:
        """The loops for the roles of this process, the most important for health first."""
        loops = [self.locks, self.announce, self.reports]
        if self._roles.fanout:
            loops += [self.fanout, self.housekeeping, self.operations, self.figures]
            loops += [self.retention] * self._purges
        if self._roles.handling:
            loops += [self.find, self.settle, self.share]
        return loops if self.jobs is None else [*loops, self.jobs]

    def stop_finding(self) -> None:
        """End the loops that find work. The loops that write outcomes and hold the locks continue."""
        for loop in self.all:
            if loop not in (self.settle, self.locks):
                loop.stop()

    def stop(self) -> None:
        """End all loops, including those that a drain does not drive: acquiring a lock may have woken some of them."""
        for loop in self.all:
            loop.stop()

    def answered_at(self, *, fans_out: bool) -> float:
        """Return when a loop that queries the database in nearly every round last succeeded (event loop time).

        ``fans_out``: True if this process holds the fan-out lock. Without it the fan-out loop reads nothing.
        """
        querying = [self.locks] + [self.announce] * self._roles.handling + [self.fanout] * fans_out
        return max(loop.good_at for loop in querying)


def every(seconds: float) -> PollSchedule:
    """A schedule with the same pause after each round."""
    return PollSchedule(lambda: seconds)


def _seconds(delay: timedelta) -> Callable[[], float]:
    seconds = delay.total_seconds()
    return lambda: seconds
