"""One shard at work: its locks, its fan-out, its dispatch, each driven by a loop of its own.

Shards share nothing but the handlers, so a dead or slow one delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import Any
from uuid import UUID

from msgspec import Struct

from outboxio.calling import Counters
from outboxio.clock import ShardClock
from outboxio.consuming import InlineShard
from outboxio.dispatcher import Dispatcher
from outboxio.emission import Emitter
from outboxio.envelope import Execute, HandlerContext, Join
from outboxio.errors import ShutdownError
from outboxio.event import EventRecord
from outboxio.fanout import Announcer, Fanout
from outboxio.handler import HandlerRegistry
from outboxio.keeper import LockKeeper, standby_pause
from outboxio.loop import FOR_EVER, Loop
from outboxio.names import LockName, channel_name
from outboxio.notifier import LONGEST_GAP, Notifier
from outboxio.options import DeadHook
from outboxio.outcome import Lease
from outboxio.redaction import Redact
from outboxio.retention import Retention
from outboxio.round import NOTHING, Round
from outboxio.settings import Settings
from outboxio.storage.protocols import Database

logger = logging.getLogger(__name__)

EVENTS, NOTIFICATIONS = "events", "notifications"  # what a wake-up from another process may be about

_HOUSEKEEPING_DELAY = 30.0
_QUICKEST_FANOUT = 0.002  # seconds: under steady load events come all the time
_ANNOUNCE_DELAY = 1.0
_SETTLE_DELAY = 1.0
_STANDBY_DELAY = 1.0
_LONGEST_LEAVE = 5.0
_CLOCKS_DIFFER = 0.25  # seconds by which processes may disagree that have measured the database's clock in haste


class Roles(Struct, frozen=True):
    """What an instance does while it runs."""

    fanout: bool
    handling: bool


class ShardRuntime:
    """One database and what goes on in it for one outbox."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        clock: ShardClock,
        emitter: Emitter,
        handlers: HandlerRegistry,
        settings: Settings,
        *,
        owner: str,
        resources: Any,
        execute: Execute,
        join: Join,
        outbox: object,
        on_dead: DeadHook | None,
        redact: Redact,
    ) -> None:
        self.database = database
        self.clock = clock
        self.emitter = emitter
        self._namespace = namespace
        self._handlers = handlers
        self._settings = settings
        self._owner = owner
        self._resources = resources
        self._execute = execute
        self._join = join
        self._outbox = outbox
        self._on_dead = on_dead
        self._redact = redact
        self._channel = channel_name(namespace)
        self._wakes = {kind: Notifier(self._sender(kind)) for kind in (EVENTS, NOTIFICATIONS)}
        self.work: ShardWork | None = None
        self._inline: InlineShard | None = None
        self._left_behind: set[UUID] = set()  # notifications whose handlers ignore their cancellation, and still run

    @property
    def name(self) -> str:
        return self.database.name

    def committed(self, events: Sequence[EventRecord] | None = None) -> None:
        """Events were committed by this process: wake fan-out, here if it is here, elsewhere otherwise."""
        if self.work is not None:
            self.work.fanout.expect(events)
            self.work.fanout_loop.wake()
        if self.work is None or not self.work.fans_out:
            self._poke(EVENTS)

    def became_due(self) -> None:
        """Notifications were made, or made due: their handlers may be here, or in any other process."""
        if self.work is not None:
            self.work.find_loop.wake()
        self._poke(NOTIFICATIONS)

    async def prepare(self, roles: Roles) -> None:
        """Check what can be checked before anything runs, and announce the handlers of this instance."""
        self.database.require_room(loops=2 + roles.fanout + 2 * roles.handling)
        try:
            await self.database.refuse_shared_sessions()
            await self.database.schema.check()
        except BaseException:
            await self.database.release_loops()
            raise

    def start_work(self, roles: Roles) -> ShardWork:
        """Everything that one stay in ``running()``, or one ``drain()``, needs."""
        work = self.work = ShardWork(self, roles)
        return work

    def build(self, work: ShardWork, roles: Roles) -> tuple[LockKeeper, Announcer, Fanout, Dispatcher]:
        """The parts of a stay, wired to one another."""
        settings = self._settings
        announcer = Announcer(self._namespace, self.database, self._handlers, self.clock, settings.subscription_ttl)
        fanout_lock = LockName(self._namespace, "fanout")
        names = [fanout_lock] * roles.fanout
        names += [LockName(self._namespace, "dispatch", name) for name in self._handlers.names] * roles.handling
        heartbeat = settings.lock_heartbeat.total_seconds()
        keeper = LockKeeper(
            self.database.cluster_lock(self._owner, self._channel if settings.notify else None, heartbeat),
            names,
            self.clock,
            heartbeat=heartbeat,
            taken=work.lock_taken,
            lost=work.lock_lost,
            proven_until=work.locks_proven_until,
            heard=self._heard,
        )
        fanout = Fanout(
            self._namespace,
            self.database,
            announcer,
            self.clock,
            batch_size=settings.fanout_batch_size,
            holds_lock=lambda: keeper.holds(fanout_lock),
            fanned_out=self.became_due,
            handover=lambda: dispatcher.handover(),
        )
        context = self._context(work.stopping)
        dispatcher = Dispatcher(
            self._namespace,
            self.database,
            self._handlers,
            self.clock,
            settings,
            context,
            on_dead=self._on_dead,
            emitted=self.committed,
            unblocked=lambda: self._poke(NOTIFICATIONS),
            left_behind=self._left_behind,
        )
        return keeper, announcer, fanout, dispatcher

    def _context(self, stopping: asyncio.Event) -> HandlerContext:
        return HandlerContext(
            namespace=self._namespace,
            shard=self.name,
            resources=self._resources,
            stopping=stopping,
            emitter=self.emitter,
            execute=self._execute,
            join=self._join,
            outbox=self._outbox,
            redact=self._redact,
        )

    def inline(self) -> InlineShard:
        """What runs handlers for messages, outside of any stay."""
        if self._inline is None:
            self._inline = InlineShard(
                self._namespace,
                self.database,
                self.clock,
                self._handlers,
                self._settings,
                self._context(asyncio.Event()),
                on_dead=self._on_dead,
                committed=self.committed,
                became_due=self.became_due,
            )
        return self._inline

    async def close(self) -> None:
        await self.flush_wakes()
        await self.database.close()

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def namespace(self) -> str:
        return self._namespace

    async def flush_wakes(self) -> None:
        """Send the wake-ups that are due, and end their tasks."""
        for notifier in self._wakes.values():
            await notifier.close()

    def _poke(self, kind: str) -> None:
        if self._settings.notify and self.database.wakes_across_processes:
            self._wakes[kind].poke()

    def _sender(self, kind: str) -> Callable[[], Awaitable[None]]:
        return lambda: self.database.notify(self._channel, f"{kind} {self._owner}")

    def _heard(self, payload: str) -> None:
        kind, _, sender = payload.partition(" ")
        if self.work is None or sender == self._owner:
            return
        if kind == EVENTS:
            self.work.fanout_loop.wake()
        elif kind == NOTIFICATIONS:
            self.work.look_twice()


class ShardWork:
    """One stay of one shard in ``running()``, or one ``drain()``: from taking the locks to giving them back."""

    def __init__(self, shard: ShardRuntime, roles: Roles) -> None:
        self._shard = shard
        self._roles = roles
        self.stopping = asyncio.Event()
        self._leave = asyncio.Event()
        self.keeper, self.announcer, self.fanout, self.dispatcher = shard.build(self, roles)
        settings = shard.settings
        name = shard.name
        self.keeper_loop = Loop(f"locks of {name}", self.keeper.run_once, self.keeper.poll_delay)
        self.announce_loop = Loop(f"subscriptions of {name}", self._announce, lambda: _ANNOUNCE_DELAY)
        # What other processes commit is heard of, or else looked for: often while there is traffic. What is fanned out
        # here is known here, unless it has to wait for what others handle.
        eager = 0.0 if shard.database.wakes_across_processes else FOR_EVER
        fanout_delay, find_delay = _seconds(settings.fanout_poll_delay), _seconds(settings.handling_poll_delay)
        self.fanout_loop = Loop(
            f"fan-out of {name}",
            self.fanout.run_once,
            fanout_delay,
            eager_for=lambda: max(eager, LONGEST_GAP),
            quickest=_QUICKEST_FANOUT,
            heard_within=LONGEST_GAP,
        )
        self.find_loop = Loop(
            f"dispatch of {name}",
            self.dispatcher.find_once,
            find_delay,
            eager_for=lambda: 0.0 if self.fans_out and not self.dispatcher.waits_for_others else eager,
        )
        self.settle_loop = Loop(f"outcomes of {name}", self.dispatcher.settle_once, lambda: _SETTLE_DELAY)
        self.housekeeping_loop = Loop(f"housekeeping of {name}", self._keep_house, lambda: _HOUSEKEEPING_DELAY)
        self.retention = Retention(shard.namespace, shard.database, shard.clock, settings)
        self.retention_loop = Loop(f"retention of {name}", self._purge, self._purge_delay)
        self.keeper.wake = self.keeper_loop.wake
        self.dispatcher.wake_finding = self.find_loop.wake
        self.dispatcher.wake_settling = self.settle_loop.wake
        self.dispatcher.doubt = self.keeper.doubt
        self._reported_unroutable: set[str] = set()
        self._proven_until = float("-inf")
        self._looks_again = False
        self._heard_at = float("-inf")
        self.is_prepared = False

    @property
    def name(self) -> str:
        return self._shard.name

    @property
    def loops(self) -> list[Loop]:
        """Every loop of this stay, those that matter most to health first."""
        mine = [self.keeper_loop, self.announce_loop]
        if self._roles.fanout:
            mine += [self.fanout_loop, self.housekeeping_loop]
            mine += [self.retention_loop] * self._shard.settings.purge_enabled
        if self._roles.handling:
            mine += [self.find_loop, self.settle_loop]
        return mine

    @property
    def counters(self) -> Counters:
        return self.dispatcher.counters

    @property
    def fans_out(self) -> bool:
        """Whether this process is the one that fans out."""
        return self.keeper.holds(LockName(self._shard.namespace, "fanout"))

    # --- what the keeper tells -----------------------------------------------------------------

    def lock_taken(self, name: LockName, lease: Lease) -> None:
        if name.role == "dispatch":
            self.dispatcher.take(name.handler_name, lease)
            self.look_twice()
        else:
            self.fanout_loop.wake()
            self.retention_loop.wake()

    def lock_lost(self, name: LockName) -> None:
        if name.role == "dispatch":
            self.dispatcher.lose(name.handler_name)
        else:
            self.find_loop.wake()  # from now on others fan out

    def look_twice(self) -> None:
        """Another process may have made notifications, due by its clock: by ours that may still be a moment away."""
        self.find_loop.wake()
        self._heard_at = asyncio.get_running_loop().time()
        if not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_later(_CLOCKS_DIFFER, self._look_again)

    def _look_again(self) -> None:
        """A while after the last time that something was heard: what came meanwhile is due later."""
        self.find_loop.wake()
        loop = asyncio.get_running_loop()
        left = self._heard_at + _CLOCKS_DIFFER - loop.time()
        self._looks_again = left > 0
        if self._looks_again:
            loop.call_later(left, self._look_again)

    def locks_proven_until(self, moment: float) -> None:
        was_in_doubt = asyncio.get_running_loop().time() >= self._proven_until
        self._proven_until = moment
        self.dispatcher.trust_until(moment)
        if was_in_doubt:
            # A wake-up that came meanwhile found nobody who was allowed to work.
            self.fanout_loop.wake()
            self.find_loop.wake()

    # --- running -------------------------------------------------------------------------------

    async def run(self, *, unprepared: bool) -> None:
        """Drive all loops until :meth:`leave`, then wind down. A shard that was down is waited for before that."""
        try:
            await self._run(unprepared=unprepared)
        except asyncio.CancelledError:
            # The event loop ends, and nobody has left running(): outcomes and locks are still worth a moment.
            await self.end_drain()
            raise

    async def _run(self, *, unprepared: bool) -> None:
        self.dispatcher.caller.home = asyncio.current_task()
        if unprepared and not await self._prepare_at_last():
            return
        problem: ShutdownError | None = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop.run(), name=f"outboxio {loop.name}") for loop in self.loops]
            await self._leave.wait()
            problem = await self._wind_down()
            _, late = await asyncio.wait(tasks, timeout=_LONGEST_LEAVE)
            for task in late:
                task.cancel()  # a statement that never answers must not keep us
        await self._release_connections()
        if problem is not None:
            raise problem

    def leave(self) -> None:
        """Begin to wind down: handlers see ``envelope.stopping``."""
        self.stopping.set()
        self._leave.set()

    async def _prepare_at_last(self) -> bool:
        """Probe with backoff until the shard can be prepared; whether it was before the end."""

        async def prepare() -> Round:
            await self._shard.prepare(self._roles)
            self.is_prepared = True
            probe.stop()
            return Round(1)

        probe = Loop(f"shard {self._shard.name}", prepare, lambda: _ANNOUNCE_DELAY)
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(probe.run())
            leaving = group.create_task(self._leave.wait())
            await asyncio.wait((probing, leaving), return_when=asyncio.FIRST_COMPLETED)
            probing.cancel()
            leaving.cancel()
        return self.is_prepared

    async def _wind_down(self) -> ShutdownError | None:
        """Stop claiming, let handlers end, write every outcome, give the locks back."""
        for loop in self.loops:
            if loop not in (self.settle_loop, self.keeper_loop):
                loop.stop()
        problem = None
        try:
            await self.dispatcher.stop(self._shard.settings.shutdown_timeout.total_seconds())
        except ShutdownError as error:
            problem = error
        self.settle_loop.stop()
        self.keeper_loop.stop()
        await self._release_locks()
        return problem

    async def end_drain(self) -> None:
        """Send the workers home, and give everything back."""
        try:
            await self.dispatcher.stop(0)
        finally:
            await self.release()
            await self._shard.flush_wakes()

    async def release(self) -> None:
        """Give back locks and connections; a database that is gone must not keep us."""
        await self._release_locks()
        await self._release_connections()

    async def _release_locks(self) -> None:
        try:
            async with asyncio.timeout(_LONGEST_LEAVE):
                await self.keeper.release()
        except Exception as error:
            logger.warning("the locks of shard %s end with their session: %r", self._shard.name, error)

    async def _release_connections(self) -> None:
        """After everything that would open them again has ended."""
        try:
            async with asyncio.timeout(_LONGEST_LEAVE):
                await self._shard.database.release_loops()
        except Exception as error:
            logger.warning("the connections of shard %s could not be given back: %r", self._shard.name, error)

    # --- draining ------------------------------------------------------------------------------

    async def drain(self, *, beside_loops: bool) -> None:
        """Fan out and dispatch until nothing is due, here or where another process holds the locks.

        Without the loops of ``running()`` it has two of its own, for handlers may take long: one keeps the locks, one
        writes outcomes while other handlers still run. Beside them, it comes to an end when they do.
        """
        if beside_loops:
            return await self._drain_beside_loops()
        self.dispatcher.caller.home = asyncio.current_task()
        problem: Exception | None = None
        async with asyncio.TaskGroup() as group:
            helpers = [self.keeper_loop, self.settle_loop]
            for loop in helpers:
                group.create_task(loop.run(), name=f"outboxio {loop.name}")
            try:
                await self._drain_all(beside_loops=False)
            except Exception as error:
                problem = error  # as it is, not as a group
            finally:
                for loop in helpers:
                    loop.stop()
        if problem is not None:
            raise problem

    async def _drain_beside_loops(self) -> None:
        try:
            await self._drain_all(beside_loops=True)
        except Exception:
            if not self._leave.is_set():
                raise
            # The loops' connections were closed under it: whoever drains goes on without them.

    async def _drain_all(self, *, beside_loops: bool) -> None:
        while not self._leave.is_set():
            if not beside_loops:
                await self.keeper.run_once()
            if not beside_loops or not self.dispatcher.knows_pauses:
                await self._announce()  # until the pauses are known nothing starts
            before = self._progress()
            if await self._drain_pass() or self.dispatcher.flush():
                continue
            if await self._due_elsewhere():
                await asyncio.sleep(standby_pause() / 4)
            elif self._progress() == before:
                await self._keep_house()
                return

    async def _drain_pass(self) -> bool:
        """One look at everything that is ours; whether anything was found, or there may be more."""
        fanned_out, dispatched = await self.fanout.run_once(), await self.dispatcher.run_once()
        # What a batch handler gathers is not found yet, but there may be more of it. And fan-out may have looked only
        # behind what it had reached.
        return fanned_out.more or dispatched.more or fanned_out.found > 0 or dispatched.found > 0

    def _progress(self) -> tuple[int, Counters, int]:
        """What has happened so far, here and in the loops. With a lock comes work that nobody here has looked for."""
        return self.fanout.events, copy(self.counters), self.keeper.gains

    async def _due_elsewhere(self) -> bool:
        """Whether work of ours waits for a lock that another process holds, or that we have to prove anew."""
        lacking = self.keeper.not_held
        names = [name.handler_name for name in lacking if name.role == "dispatch"]
        database, namespace, now = self._shard.database, self._shard.namespace, self._shard.clock()
        if names and await database.notifications.any_due(namespace, now, names):
            return True
        if any(name.role == "fanout" for name in lacking):
            return await database.events.any_undelivered(namespace, self.announcer.seen_since(now))
        return False

    # --- the rest ------------------------------------------------------------------------------

    async def _announce(self) -> Round:
        """Tell the others what handlers are here, and hear which of them an operator has paused."""
        await self.announcer.announce_if_due()
        if self._roles.handling:
            self.dispatcher.heed_pauses(await self._shard.database.subscriptions.pauses(self._shard.namespace))
        return Round(0)

    async def _purge(self) -> Round:
        """One piece of removing what was kept long enough, in the one process that fans out."""
        return await self.retention.run_once() if self.fans_out else NOTHING

    def _purge_delay(self) -> float:
        return self.retention.pause if self.fans_out else _STANDBY_DELAY

    async def _keep_house(self) -> Round:
        """Report notifications whose handler no instance has, and let them expire like any other."""
        if not self.fans_out:
            return Round(0)
        shard, now = self._shard, self._shard.clock()
        names = await self.unroutable_names()
        for name in sorted(set(names) - self._reported_unroutable):
            logger.warning(
                "handler %r has unfinished notifications, and no instance has such a handler: deploy it, or give its "
                "successor the alias; they expire by retention", name, extra={"handler_name": name},
            )  # fmt: skip
        self._reported_unroutable = set(names)
        if not names:
            return Round(0)
        before = now - shard.settings.handling_retention_window
        size = shard.settings.handling_batch_size
        done = await shard.database.notifications.expire(shard.namespace, names, before, now, size)
        self.counters.expired += done
        return Round(done, more=done >= size)

    async def unroutable_names(self) -> list[str]:
        return await unroutable_names(
            self._shard.database, self._shard.namespace, self.announcer.seen_since(self._shard.clock())
        )


async def unroutable_names(database: Database, namespace: str, seen_since: Any) -> list[str]:
    """Handler names with unfinished notifications that no instance has, neither as a name nor as an alias."""
    unfinished = await database.notifications.unfinished_names(namespace)
    if not unfinished:
        return []
    routable = await database.subscriptions.routable_names(namespace, seen_since)
    return [name for name in unfinished if name not in routable]


def _seconds(delay: Any) -> Callable[[], float]:
    seconds = delay.total_seconds()
    return lambda: seconds
