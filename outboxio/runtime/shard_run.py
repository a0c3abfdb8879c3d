"""A shard between entering and leaving ``running()``: locks, fan-out, dispatch, each driven by a loop.

The parts are made in this order, and each part is given earlier parts: the signals, the lock manager, the dispatcher,
fan-out, the loops. A service sets a signal, and the loop of that signal does a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from outboxio.dispatch.dispatcher import Dispatcher
from outboxio.errors import ShutdownError
from outboxio.fanout.fanout import Announcer, Fanout
from outboxio.loops.flood import end_floods
from outboxio.loops.loop import Loop, RoundResult, Signals
from outboxio.loops.standstill import watched
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
_PROBE_DELAY = 1.0  # seconds between two tries to reach a shard that is down
_CLOCKS_DIFFER = 0.25  # seconds: two processes that measured the database's clock in haste may differ by so much


class ShardRun:
    """The work of a shard in ``running()``, or in a ``drain()``: from taking the locks to giving the locks back."""

    def __init__(self, shard: ShardRuntime, roles: Roles, *, drains: bool = False) -> None:
        """``drains``: take every lock that is free, and share no handler."""
        environment = shard.environment
        settings, namespace = environment.settings, environment.namespace
        self.shard, self._roles = shard, roles
        self._leave, self.stopping = asyncio.Event(), asyncio.Event()
        self._proven_until = float("-inf")
        self.prepared_at: float | None = None
        """The event loop's moment since when the schema fits and the loops work; ``None`` before."""
        self.probe: Loop | None = None
        """The loop that tries to reach a shard that was down; ``None`` if the shard was never down."""
        self.signals = Signals()
        heartbeat = settings.lock_heartbeat.total_seconds()
        channel = environment.channel if settings.notify else None
        self.jobs = shard.scheduler(self, runs=roles.handling and not drains)
        self.membership = self._join(drains=drains)
        self.locks = LockManager(
            shard.database.cluster_lock(environment.owner, channel, heartbeat, environment.longest_block),
            self.membership, shard.clock,
            heartbeat=heartbeat, observer=self, heard=shard.heard, wake=self.signals.locks,
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
            seen_since=self.announcer.seen_since, expired=self._expired, hears_of_partitions=roles.handling,
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
        """The membership of this process among the processes that share handlers."""
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
            membership.heed(environment.handlers.names_to_run, {})  # the locks are taken before the first announcement
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
        """True as soon as the outbox is left."""
        return self._leave.is_set()

    @property
    def answered_at(self) -> float:
        """The event loop's moment at which the database has last answered, as far as the loops tell."""
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
            self.signals.find.set()  # another process fans out from now on, so finding may have to be eager

    def locks_proven_until(self, moment: float) -> None:
        """See :class:`~outboxio.runtime.lock_manager.LockObserver`."""
        was_over = asyncio.get_running_loop().time() >= self._proven_until
        self._proven_until = moment
        self.dispatcher.trust_until(moment)
        if was_over:
            # A wake-up that came meanwhile had no effect, because no row was allowed to start.
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

    def is_sick(self, now: float) -> bool:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        return self.dispatcher.is_sick(now)

    def gave_back(self) -> None:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        self.shard.gave_back()

    async def unowned(self, slots: Sequence[Slot]) -> None:
        """See :class:`~outboxio.runtime.membership.SlotControl`."""
        await self.housekeeping.unowned.look(slots)

    def find_for_other_clocks(self) -> None:
        """Another process may have made notifications that are due by its clock, and by ours perhaps 0.25 s later.

        Or that process has ended rows for which rows of this process have waited.
        """
        self.dispatcher.sweep_stranded_keys()
        self.loops.find.wake(again_after=_CLOCKS_DIFFER)

    # --- running -------------------------------------------------------------------------------

    async def drive(self, *, unprepared: bool) -> None:
        """Drive all loops until :meth:`leave`, then wind down. ``unprepared``: probe the shard first."""
        standstills = watched(self.dispatcher.running, self.stood_still)
        with standstills, shared_fields(**self.shard.log_fields), self._reporting.shown():
            try:
                await self._drive(unprepared=unprepared)
            except asyncio.CancelledError:
                # The event loop ends without leaving running(). Outcomes and locks are still worth a moment.
                await self.abandon()
                raise
            finally:
                end_floods()

    async def _drive(self, *, unprepared: bool) -> None:
        self.dispatcher.caller.home = asyncio.current_task()
        if unprepared and not await self._prepare_at_last():
            return
        self.prepared_at = asyncio.get_running_loop().time()
        problem: ShutdownError | None = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop.run(), name=f"outboxio {loop.name}") for loop in self.loops.all]
            await self._leave.wait()
            problem = await self._wind_down()
            _, late = await asyncio.wait(tasks, timeout=_LONGEST_LEAVE)
            for task in late:
                task.cancel()  # a statement that is never answered must not keep the application from leaving
        await self._release_connections()
        if problem is not None:
            raise problem

    def leave(self) -> None:
        """Begin to wind down: handlers see ``envelope.stopping``."""
        self.stopping.set()
        self._leave.set()

    async def _prepare_at_last(self) -> bool:
        """Try to prepare the shard, with backoff. True if that succeeds before the outbox is left."""
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
        """Stop finding, let handlers end, write every outcome, give the locks back: in this order."""
        self.loops.stop_finding()
        problem = None
        self.jobs.begin_to_stop(self.shard.environment.settings.shutdown_timeout.total_seconds())
        await self._tell_that_it_leaves()
        try:
            await self.dispatcher.stop(self.shard.environment.settings.shutdown_timeout.total_seconds())
        except ShutdownError as error:
            problem = error
        await self.jobs.end()
        self.loops.settle.stop()
        self.loops.locks.stop()
        await asyncio.gather(self._release_locks(), self._reporting.leave())
        return problem

    async def _tell_that_it_leaves(self) -> None:
        """Let other processes take over each partition as soon as it is idle here. The database may be gone."""
        try:
            async with asyncio.timeout(_LONGEST_LEAVE):
                await self.membership.begin_to_leave()
        except Exception as error:
            logger.warning(
                "shard %s could not say that this process leaves: %s", self.shard.name, error, shard=self.shard.name
            )

    async def abandon(self) -> None:
        """Cancel the workers without a grace period, and give back locks and connections. So ends a drain."""
        try:
            await self.jobs.end()
            await self.dispatcher.stop(0)
        finally:
            self.loops.stop()
            await asyncio.gather(self._release_locks(), self._reporting.leave())
            await self._release_connections()
            await self.shard.flush_wakes()

    async def _release_locks(self) -> None:
        """Give the locks back, within 5 s: the database may be gone."""
        try:
            async with asyncio.timeout(_LONGEST_LEAVE):
                await self.locks.release()
                await self.membership.leave()
        except Exception as error:
            logger.warning(
                "the locks of shard %s end with their session: %s", self.shard.name, error, shard=self.shard.name
            )

    async def _release_connections(self) -> None:
        """Close the loops' connections, after the end of every task that would open a connection again."""
        try:
            async with asyncio.timeout(_LONGEST_LEAVE):
                await self.shard.database.release_loops()
        except Exception as error:
            logger.warning(
                "the connections of shard %s could not be given back: %s", self.shard.name, error,
                shard=self.shard.name,
            )  # fmt: skip

    # --- the rest ------------------------------------------------------------------------------

    def stood_still(self, seconds: float) -> None:
        """The event loop stood still."""
        self.counters.standstills += 1

    def _expired(self, number: int) -> None:
        self.counters.expired += number
        self.shard.statistics.unroutable_expired += number
        self.shard.changed_by_hand()
