"""A ``running()`` of an outbox: every shard works until the last block that shares the run has ended.

The loops of a shard run: which rounds they drive, how often, and woken by which signal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from msgspec import Struct

from outboxio.dispatch.dispatcher import Dispatcher
from outboxio.errors import ConfigurationError, DatabaseUnavailable, SameDatabase, ShutdownError
from outboxio.fanout.fanout import Fanout
from outboxio.jobs.scheduler import JobScheduler
from outboxio.loops.loop import FOR_EVER, Loop, PollSchedule, Signals
from outboxio.model.lock_name import LockName
from outboxio.operations.reporting.figures import FIGURES_DELAY
from outboxio.operations.retention import Housekeeping
from outboxio.operations.takeover import LOOK_DELAY, Takeover
from outboxio.runtime.environment import Roles
from outboxio.runtime.lock_manager import LockManager
from outboxio.runtime.membership import Membership
from outboxio.runtime.reporting import RunReporting
from outboxio.runtime.shard import ShardRuntime
from outboxio.runtime.wakeups import LONGEST_GAP
from outboxio.settings import Settings
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage.protocols import ClusterLock
from outboxio.storage.unavailable import as_unavailable
from outboxio.support import machine
from outboxio.support.aio import Signal, to_the_end
from outboxio.support.log import log_of
from outboxio.telemetry.protocol import Round, RoundKind

if TYPE_CHECKING:
    from outboxio.runtime.shard_run import ShardRun

T = TypeVar("T")
Leave = Callable[[], Coroutine[Any, Any, None]]

logger = log_of(__name__)


class Running:
    """Starts and stops the shards.

    The shards run in a separate task. A task group must be left by the task that entered the group, but ``running()``
    may be left by any task.
    """

    def __init__(self, shards: list[ShardRuntime], roles: Roles) -> None:
        self._shards = shards
        self._roles = roles
        self._blocks = 1
        self._stopping = False
        self._runs: list[ShardRun] = []
        self._problems: list[Exception] = []
        self._task: asyncio.Task[None] | None = None

    def join(self, roles: Roles) -> None:
        """A further block shares this run."""
        self.require(roles)
        self._blocks += 1

    def require(self, roles: Roles) -> None:
        """Raise :class:`ConfigurationError` unless this run has ``roles``."""
        if (roles.fanout and not self._roles.fanout) or (roles.handling and not self._roles.handling):
            raise ConfigurationError(
                f"running() is entered already as {self._roles} and cannot be {roles} as well; enter it once with all"
            )

    @property
    def has_begun(self) -> bool:
        """True if the shards work. False while the shards are prepared."""
        return self._task is not None

    @property
    def is_over(self) -> bool:
        """True if the event loop ended before the run was left."""
        return self._task is not None and self._task.done()

    @property
    def runs(self) -> Sequence[ShardRun]:
        """The shard runs."""
        return self._runs

    @property
    def problems(self) -> Sequence[Exception]:
        """The errors that have ended shards."""
        return self._problems

    @property
    def is_in_last_block(self) -> bool:
        """True if a single block shares this run."""
        return self._blocks <= 1

    def release(self) -> bool:
        """A block ends. True for the last block."""
        self._blocks -= 1
        return self._blocks <= 0

    async def start(self) -> None:
        """Check every shard, announce the handlers, and start the loops. A shard that is down is probed later."""
        ready: list[ShardRuntime] = []
        down: dict[str, DatabaseUnavailable] = {}
        try:
            for shard in self._shards:
                try:
                    with as_unavailable(shard.database):
                        await shard.prepare(self._roles)
                    ready.append(shard)
                except DatabaseUnavailable as error:
                    down[shard.name] = error
            await refuse_same_database(ready)
            for shard in ready:
                self._runs.append(shard.start_run(self._roles))
                try:
                    with as_unavailable(shard.database):
                        await self._runs[-1].announcer.announce_if_due()
                except DatabaseUnavailable as error:
                    down[shard.name] = error
            if len(down) == len(self._shards):
                raise next(iter(down.values()))
        except BaseException:
            await to_the_end(self._abandon())
            raise
        for name, reason in down.items():
            logger.error("shard %s is down and is probed until it comes: %s", name, reason, shard=name)
        self._runs += [shard.start_run(self._roles) for shard in self._shards if shard not in ready]
        self._task = asyncio.create_task(self._run(set(down)), name="outboxio running")

    async def _abandon(self) -> None:
        for shard in self._shards:
            shard.work = None
            await shard.database.release_loops()

    async def stop(self) -> None:
        """Wind all shards down. Raises :class:`ShutdownError` if outcomes were lost."""
        self._stopping = True
        for run in self._runs:
            run.leave()
        assert self._task is not None
        try:
            await self._task
        finally:
            for shard in self._shards:
                await shard.flush_wakes()
        if self._problems:
            self._raise_problem(ExceptionGroup("shards did not end well", self._problems))

    async def _run(self, down: set[str]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for run in self._runs:
                    group.create_task(self._run_one(run, unprepared=run.name in down))
        finally:
            for shard in self._shards:
                shard.work = None

    async def _run_one(self, run: ShardRun, *, unprepared: bool) -> None:
        """Run a shard. An error must not cancel the other shards, so :meth:`stop` raises the error at the end."""
        try:
            await run.drive(unprepared=unprepared)
        except Exception as error:
            self._problems.append(error)
            if not self._stopping:
                logger.critical(
                    "all loops of shard %s have ended, its events wait", run.name, exc_info=error, shard=run.name
                )

    @staticmethod
    def _raise_problem(group: BaseExceptionGroup[BaseException]) -> None:
        lost, rest = group.split(ShutdownError)
        if rest is not None:
            raise rest
        assert lost is not None
        ids = [i for error in _leaves(lost) if isinstance(error, ShutdownError) for i in error.notification_ids]
        raise ShutdownError(ids) from group


class RunHandle(Generic[T]):
    """An ``async with outbox.running()``. The handle holds no task, so any task may leave the block."""

    def __init__(self, enter: Callable[[], Awaitable[tuple[T, Leave]]]) -> None:
        """``enter`` returns the value of the block, and a function that ends the block."""
        self._enter = enter
        self._leave: Leave | None = None

    async def __aenter__(self) -> T:
        entered, self._leave = await self._enter()
        return entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._leave is not None
        await to_the_end(self._leave())


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            found.append(error)
    return found


HOUSEKEEPING_DELAY = 30.0
QUICKEST_FANOUT = 0.002  # seconds: under steady load events come all the time
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
    """Announces the handlers, and reads the orders of operators."""
    fans_out: Callable[[], bool]
    """True if this process fans out."""


class RunLoops:
    """A loop for each service of a shard run."""

    def __init__(
        self,
        name: str,
        signals: Signals,
        settings: Settings,
        roles: Roles,
        services: Services,
        *,
        wakes_across_processes: bool,
        statistics: ShardStatistics,
        watched: Callable[[RoundKind, Round], Round],
    ) -> None:
        """``name``: the shard. ``wakes_across_processes``: True if the database sends wake-ups between processes.

        ``watched`` lets telemetry surround the rounds of a kind.
        """
        locks, membership, dispatcher, jobs = services.locks, services.membership, services.dispatcher, services.jobs
        housekeeping, reporter = services.housekeeping, services.reporting.reporter
        self._roles = roles
        self._purges = settings.purge_enabled
        # Where the database sends no wake-ups between processes, a loop polls quickly while there is traffic. Finding
        # need not, if this process fans out and owns all partitions, because fan-out wakes the loop. But a row that has
        # to wait for a row of another process gets no wake-up.
        eager = 0.0 if wakes_across_processes else FOR_EVER
        of_fanout = PollSchedule(
            _seconds(settings.fanout_poll_delay), eager_for=lambda: max(eager, LONGEST_GAP), quickest=QUICKEST_FANOUT,
            heard_within=LONGEST_GAP,
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
        self.announce = loop("subscriptions", services.announce, PollSchedule(membership.orders_delay))
        self.fanout = loop("fan-out", watched("fanout", services.fanout.run_once), of_fanout, signals.fan_out)
        self.find = loop("dispatch", dispatcher.find_once, of_finding, signals.find)
        settle_once = watched("settle", dispatcher.settle_once)
        self.settle = loop("outcomes", settle_once, every(SETTLE_DELAY), signals.settle)
        self.housekeeping = loop("housekeeping", housekeeping.run_once, every(HOUSEKEEPING_DELAY))
        self.takeover = services.takeover
        self.operations = loop("operations", self.takeover.run_once, every(LOOK_DELAY))
        purge = watched("purge", housekeeping.purge)
        self.retention = loop("retention", purge, PollSchedule(housekeeping.purge_delay))
        self.reports = loop("reports", reporter.run_once, every(reporter.delay))
        self.jobs = loop("jobs", jobs.run_once, PollSchedule(jobs.delay), signals.jobs) if jobs.locks else None
        self.figures = loop("figures", services.reporting.figures.run_once, every(FIGURES_DELAY))

    def began_to_fan_out(self) -> None:
        """This process fans out from now on, and so does what only the process that fans out does."""
        for loop in (self.retention, self.operations, self.figures):
            loop.wake()

    @property
    def all(self) -> list[Loop]:
        """The loops of the roles of this process, the most important loop for health first."""
        loops = [self.locks, self.announce, self.reports]
        if self._roles.fanout:
            loops += [self.fanout, self.housekeeping, self.operations, self.figures]
            loops += [self.retention] * self._purges
        if self._roles.handling:
            loops += [self.find, self.settle, self.share]
        return loops if self.jobs is None else [*loops, self.jobs]

    def stop_finding(self) -> None:
        """End the loops that find work. The loops that write outcomes and hold the locks go on."""
        for loop in self.all:
            if loop not in (self.settle, self.locks):
                loop.stop()

    def stop(self) -> None:
        """End all loops, also those that a drain does not drive: a lock that was taken over has woken some of them."""
        for loop in self.all:
            loop.stop()

    def answered_at(self, *, fans_out: bool) -> float:
        """The event loop's moment of the last good round of a loop that asks the database in each round, or nearly so.

        ``fans_out``: True if this process holds the fan-out lock; without the lock the fan-out loop asks nothing.
        """
        asking = [self.locks] + [self.announce] * self._roles.handling + [self.fanout] * fans_out
        return max(loop.good_at for loop in asking)


def every(seconds: float) -> PollSchedule:
    """A schedule with the same pause after each round."""
    return PollSchedule(lambda: seconds)


def _seconds(delay: timedelta) -> Callable[[], float]:
    seconds = delay.total_seconds()
    return lambda: seconds


_HEARTBEAT = 10.0  # seconds, far longer than the probe takes


# Two shards that are the same database are found by a lock that each shard tries, which has a random name.


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
