"""A shard inside ``running()``: locks, fan-out and dispatch, each driven by a loop.

The parts are created in this order, and each gets the earlier ones: signals, lock manager, dispatcher, fan-out, loops.
When a service sets a signal, the loop of that signal does a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from outboxio.dispatch.dispatcher import Dispatcher
from outboxio.errors import ShutdownError
from outboxio.fanout.fanout import Announcer, Fanout
from outboxio.loops.blocked_loop import watched
from outboxio.loops.log_limiter import flush_limiters
from outboxio.loops.loop import Loop, RoundResult, Signals
from outboxio.model.lock_name import LockName, Slot
from outboxio.model.outcome import Lease
from outboxio.operations.retention import Housekeeping
from outboxio.runtime.environment import Roles
from outboxio.runtime.following import Following
from outboxio.runtime.lock_manager import LockManager
from outboxio.runtime.membership import Member, Membership
from outboxio.runtime.partition_share import PartitionShare
from outboxio.runtime.reporting import RunReporting
from outboxio.runtime.run_loops import RunLoops, Services, every
from outboxio.statistics.figures import Counters
from outboxio.support.log import log_of, shared_fields

if TYPE_CHECKING:
    from outboxio.runtime.shard import ShardRuntime

logger = log_of(__name__)

_LONGEST_LEAVE = 5.0
_PROBE_DELAY = 1.0  # seconds between two attempts to reach an unavailable shard
_CLOCKS_DIFFER = 0.25  # seconds by which two measurements of the database clock may differ


class ShardRun:
    """The work of a shard in a ``running()`` or ``drain()``, from acquiring the locks to releasing them."""

    def __init__(self, shard: ShardRuntime, roles: Roles, *, drains: bool = False) -> None:
        """``drains``: acquire every free lock, and share no handler."""
        environment = shard.environment
        settings, namespace = environment.settings, environment.namespace
        self.shard, self._roles = shard, roles
        self._leave, self.stopping = asyncio.Event(), asyncio.Event()
        self._proven_until = float("-inf")
        self.prepared_at: float | None = None
        """When the schema was checked and the loops started (event loop time); ``None`` before."""
        self.probe: Loop | None = None
        """The loop that tries to reach an unavailable shard; ``None`` if the shard was available from the start."""
        self.signals = Signals()
        heartbeat = settings.lock_heartbeat.total_seconds()
        channel = environment.channel if settings.notify else None
        self.jobs = shard.scheduler(self, runs=roles.handling and not drains)
        self.membership = self._join(drains=drains)
        self.locks = LockManager(
            shard.database.cluster_lock(environment.owner, channel, heartbeat, environment.longest_block),
            self.membership, shard.clock,
            heartbeat=heartbeat, observer=self, on_wakeup=shard.receive_wakeup, wake=self.signals.locks,
        )  # fmt: skip
        setup = self.setup = shard.handling(self.stopping)
        self.dispatcher = Dispatcher(setup, signals=self.signals, locks=self.locks, wakeups=shard, stuck=shard.stuck)
        self.announcer = Announcer(
            namespace, shard.database, environment.handlers, shard.clock, settings.subscription_ttl, environment.owner
        )
        self._holds_fanout = partial(self.locks.holds, environment.fanout_lock)
        self.fanout = Fanout(
            setup, self.announcer,
            holds_lock=self._holds_fanout, fanned_out=shard.became_due, dispatcher=self.dispatcher,
        )  # fmt: skip
        self.housekeeping = Housekeeping(
            namespace, shard.database, shard.clock, settings, fans_out=self._holds_fanout,
            seen_since=self.announcer.seen_since, expired=self._expired, receives_partition_counts=roles.handling,
            purged=shard.statistics.purged_from,
        )  # fmt: skip
        self.announce = Following(self, handling=roles.handling).run_once
        self._reporting = RunReporting(self, roles, fans_out=self._holds_fanout, drains=drains)
        services = Services(
            self.locks, self.membership, self.fanout, self.dispatcher, self.housekeeping,
            shard.takeover(self._holds_fanout), self._reporting, self.jobs, self.announce, fans_out=self._holds_fanout,
        )  # fmt: skip
        self.loops = RunLoops(shard, self.signals, roles, services)

    def _join(self, *, drains: bool) -> Membership:
        """Create the membership of this process among the processes that share handlers."""
        shard, environment = self.shard, self.shard.environment
        settings, database = environment.settings, shard.database
        share = PartitionShare(
            environment.owner, spreads_all=settings.balance == "all" and database.partitions is not None,
            takes_all=drains,
        )  # fmt: skip
        member = Member(
            environment.namespace,
            environment.owner,
            always=[environment.fanout_lock] * self._roles.fanout + [*self.jobs.locks],
            heartbeat=settings.lock_heartbeat.total_seconds(),
            is_woken=database.wakes_across_processes and settings.notify,
        )
        membership = Membership(
            member, database.partitions, share, shard.clock, self.signals, control=self
        )  # fmt: skip
        if self._roles.handling and (database.partitions is None or not environment.may_share):
            membership.apply(environment.handlers.names_to_run, {})  # acquires the locks before the first announcement
        return membership

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def counters(self) -> Counters:
        return self.dispatcher.counters

    @property
    def fans_out(self) -> bool:
        """True if this process fans out."""
        return self._holds_fanout()

    @property
    def is_leaving(self) -> bool:
        """True once the outbox begins to shut down."""
        return self._leave.is_set()

    @property
    def answered_at(self) -> float:
        """When the database last answered a loop (event loop time)."""
        return max(self.prepared_at or float("-inf"), self.loops.answered_at(fans_out=self.fans_out))

    # --- changes of the locks ------------------------------------------------------------------

    def lock_taken(self, name: LockName, lease: Lease) -> None:
        """See :class:`~outboxio.runtime.lock_manager.LockObserver`."""
        self.shard.statistics.lock_changed(name, is_held=True)
        if name.role == "dispatch":
            self.dispatcher.take(name.slot, lease)
            self.find_for_other_clocks()
        elif name.role == "jobs":
            self.jobs.take(lease)
        else:
            self.fanout.start_over()
            self.signals.fan_out.set()
            self.loops.began_to_fan_out()

    def lock_lost(self, name: LockName) -> None:
        """See :class:`~outboxio.runtime.lock_manager.LockObserver`."""
        self.shard.statistics.lock_changed(name, is_held=False)
        if name.role == "dispatch":
            self.dispatcher.lose(name.slot)
        elif name.role == "fanout":
            self.signals.find.set()  # another process fans out now, so finding may have to poll quickly

    def locks_proven_until(self, until: float) -> None:
        """See :class:`~outboxio.runtime.lock_manager.LockObserver`."""
        was_over = asyncio.get_running_loop().time() >= self._proven_until
        self._proven_until = until
        self.dispatcher.trust_until(until)
        if was_over:
            # Wake-ups since then had no effect, because no row was allowed to start.
            self.signals.fan_out.set()
            self.signals.find.set()

    def halt(self, slot: Slot) -> None:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        self.dispatcher.halt(slot)

    def resume(self, slot: Slot) -> None:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        self.dispatcher.resume(slot)

    def in_flight(self, slot: Slot) -> int:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        return self.dispatcher.in_flight(slot)

    def is_stalled(self, now: float) -> bool:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        return self.dispatcher.is_stalled(now)

    def locks_released(self) -> None:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        self.shard.locks_released()

    async def unowned(self, slots: Sequence[Slot]) -> None:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        await self.housekeeping.unowned.check(slots)

    def find_for_other_clocks(self) -> None:
        """Find rows that another process made due, now and 0.25 s later, because the clocks of processes may differ.

        Rows of this process may also have waited for rows that the other process has ended.
        """
        self.dispatcher.sweep_stranded_keys()
        self.loops.find.wake(again_after=_CLOCKS_DIFFER)

    # --- running -------------------------------------------------------------------------------

    async def drive(self, *, unprepared: bool) -> None:
        """Drive all loops until :meth:`leave`, then shut down. ``unprepared``: wait for the shard first."""
        blocks = watched(self.dispatcher.running, self.was_blocked)
        with blocks, shared_fields(**self.shard.log_fields), self._reporting.shown():
            try:
                await self._drive(unprepared=unprepared)
            except asyncio.CancelledError:
                # The event loop ends without leaving running(): write the outcomes and release the locks all the same.
                await self.abandon()
                raise
            finally:
                flush_limiters()

    async def _drive(self, *, unprepared: bool) -> None:
        self.dispatcher.caller.shard_task = asyncio.current_task()
        if unprepared and not await self._prepare_with_retries():
            return
        self.prepared_at = asyncio.get_running_loop().time()
        problem: ShutdownError | None = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop.run(), name=f"outboxio {loop.name}") for loop in self.loops.all]
            await self._leave.wait()
            problem = await self._wind_down()
            _, late = await asyncio.wait(tasks, timeout=_LONGEST_LEAVE)
            for task in late:
                task.cancel()  # a statement that never returns must not block the shutdown of your application
        await self._release_connections()
        if problem is not None:
            raise problem

    def leave(self) -> None:
        """Begin to shut down, and set ``envelope.stopping`` for the handlers."""
        self.stopping.set()
        self._leave.set()

    async def _prepare_with_retries(self) -> bool:
        """Prepare the shard, retrying with backoff. Return False if the outbox shuts down before that succeeds."""
        is_prepared = False

        async def prepare() -> RoundResult:
            nonlocal is_prepared
            await self.shard.prepare(self._roles)
            is_prepared = True
            probe.stop()
            return RoundResult(1)

        probe = self.probe = Loop(f"shard {self.shard.name}", prepare, every(_PROBE_DELAY))
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(probe.run())
            leaving = group.create_task(self._leave.wait())
            await asyncio.wait((probing, leaving), return_when=asyncio.FIRST_COMPLETED)
            probing.cancel()
            leaving.cancel()
        return is_prepared

    async def _wind_down(self) -> ShutdownError | None:
        """Stop finding, wait for the handlers, write every outcome, release the locks: in this order."""
        self.loops.stop_finding()
        problem = None
        self.jobs.begin_to_stop(self.shard.environment.settings.shutdown_timeout.total_seconds())
        await self._announce_leaving()
        try:
            await self.dispatcher.stop(self.shard.environment.settings.shutdown_timeout.total_seconds())
        except ShutdownError as error:
            problem = error
        await self.jobs.end()
        self.loops.settle.stop()
        self.loops.locks.stop()
        await asyncio.gather(self._release_locks(), self._reporting.leave())
        return problem

    async def _announce_leaving(self) -> None:
        """Let other processes take over each partition once it is idle here. The database may be unavailable."""
        try:
            async with asyncio.timeout(_LONGEST_LEAVE):
                await self.membership.begin_to_leave()
        except Exception as error:
            logger.warning(
                "could not remove this process from the cluster view of shard %s: %s",
                self.shard.name,
                error,
                shard=self.shard.name,
            )

    async def abandon(self) -> None:
        """Cancel the workers without a grace period, and release locks and connections, as at the end of a drain."""
        try:
            await self.jobs.end()
            await self.dispatcher.stop(0)
        finally:
            self.loops.stop()
            await asyncio.gather(self._release_locks(), self._reporting.leave())
            await self._release_connections()
            await self.shard.flush_wakes()

    async def _release_locks(self) -> None:
        """Release the locks, within 5 s: the database may be unavailable."""
        try:
            async with asyncio.timeout(_LONGEST_LEAVE):
                await self.locks.release()
                await self.membership.leave()
        except Exception as error:
            logger.warning(
                "could not release the locks of shard %s; they end with their session: %s",
                self.shard.name,
                error,
                shard=self.shard.name,
            )

    async def _release_connections(self) -> None:
        """Close the connections of the loops, after every task that could reopen one has ended."""
        try:
            async with asyncio.timeout(_LONGEST_LEAVE):
                await self.shard.database.release_loops()
        except Exception as error:
            logger.warning(
                "could not release the connections of shard %s: %s", self.shard.name, error,
                shard=self.shard.name,
            )  # fmt: skip

    # --- counters ------------------------------------------------------------------------------

    def was_blocked(self, seconds: float) -> None:
        """Count a block of the event loop."""
        self.counters.standstills += 1

    def _expired(self, number: int) -> None:
        self.counters.expired += number
        self.shard.statistics.unroutable_expired += number
        self.shard.changed_by_hand()
