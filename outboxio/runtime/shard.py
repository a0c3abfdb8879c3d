"""A shard, for the lifetime of the outbox: a database, a clock, and the wake-ups it sends and receives.

Shards share only the handlers, so an unavailable or slow shard delays no other shard. The loops of a shard belong to a
:class:`~outboxio.runtime.shard_run.ShardRun`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from outboxio.errors import ConfigurationError
from outboxio.model.emitter import Emitter
from outboxio.model.envelope import HandlerContext
from outboxio.model.event import EventRecord
from outboxio.runs.ports import HandlingSetup, StuckRows, WorkNote
from outboxio.runtime.environment import Environment, Roles
from outboxio.runtime.wakeups import WakeupSender
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage.protocols import Database
from outboxio.storage.schema import loop_rights
from outboxio.support.clock import ShardClock
from outboxio.support.log import Fields, shared_fields

if TYPE_CHECKING:
    from outboxio.health.collector import Collector
    from outboxio.health.reporter import MinuteKeeper
    from outboxio.inbox.inline import InlineRunner
    from outboxio.jobs.runner import JobSetup
    from outboxio.jobs.scheduler import JobScheduler
    from outboxio.operations.recorder import AdminShard
    from outboxio.operations.takeover import Takeover
    from outboxio.runtime.shard_run import ShardRun

# The subjects of wake-ups between processes.
EVENTS, NOTIFICATIONS, LOCKS, MOVED = "events", "notifications", "locks", "moved"
WORK = "work"  # carries a pair of the sender and a list of notes
MAX_NOTES = 10  # per message; PostgreSQL limits a message to 8,000 bytes
_NOTES = msgspec.json.Decoder(tuple[str, list[WorkNote]])


class ShardRuntime:
    """A database of an outbox.

    A process that only writes events needs no dispatch, inbox, jobs or operations, so these modules are imported by the
    methods that create their objects.
    """

    def __init__(
        self,
        environment: Environment,
        database: Database,
        clock: ShardClock,
        emitter: Emitter,
        *,
        is_first: bool = True,
    ) -> None:
        self.environment = environment
        self.database = database
        self.clock = clock
        self.emitter = emitter
        self._is_first = is_first
        self.statistics = ShardStatistics(emitter.sent)
        self.reset()

    def reset(self) -> None:
        """Drop the objects of the previous event loop, because a new event loop takes over."""
        self._wakes = {
            kind: WakeupSender(self._sender(kind), self.name) for kind in (EVENTS, NOTIFICATIONS, LOCKS, MOVED)
        }
        self._wakes[WORK] = WakeupSender(self._send_notes, self.name)
        self._notes: list[WorkNote] = []
        self.work: ShardRun | None = None
        self._inline: InlineRunner | None = None
        self.stuck = StuckRows(self._finished_late)
        self.statistics.reset()

    @cached_property
    def minutes(self) -> MinuteKeeper:
        """The runs per minute, for the table."""
        from outboxio.health.reporter import MinuteKeeper

        return MinuteKeeper(self.statistics)

    @property
    def name(self) -> str:
        return self.database.name

    @property
    def keeps_jobs(self) -> bool:
        """True for the first shard of an outbox with jobs."""
        return bool(self.environment.jobs) and self._is_first

    @property
    def log_fields(self) -> Fields:
        return {"namespace": self.environment.namespace, "shard": self.name}

    # --- wake-ups ------------------------------------------------------------------------------

    def committed(self, events: Sequence[EventRecord] | None = None) -> None:
        """Wake fan-out after this process committed events: here, and in other processes if this one does not fan out.

        ``events``: the committed events, if the caller knows them.
        """
        if self.work is not None:
            self.work.fanout.expect(events)
            self.work.signals.fan_out.set()
        if self.work is None or not self.work.fans_out:
            self._wake_others(EVENTS)

    def became_due(self) -> None:
        """Wake the find loops of all processes, because notifications became due."""
        if self.work is not None:
            self.work.signals.find.set()
        self._wake_others(NOTIFICATIONS)

    def unblocked(self) -> None:
        """Wake other processes, because the dispatcher made notifications due. It does not need to wake itself."""
        self._wake_others(NOTIFICATIONS)

    def moved(self) -> None:
        """Wake other processes, because notifications became due behind their scan positions (new partition count)."""
        self._wake_others(MOVED)

    def send_note(self, note: WorkNote) -> None:
        """Notify other processes of waiting rows or of free capacity."""
        self._notes.append(note)
        self._wake_others(WORK)

    def locks_released(self) -> None:
        """Wake other processes, because this one has released locks of shared handlers, or leaves."""
        self._wake_others(LOCKS)

    def decisions_changed(self) -> None:
        """Make all processes read the decisions of operators: a partition count or a cancellation has changed."""
        if self.work is not None:
            self.work.loops.announce.wake()
        self._wake_others(LOCKS)

    def operation_requested(self, id: UUID) -> None:
        """Take over a background operation that was requested or stopped here, if this process runs."""
        if self.work is not None:
            self.work.loops.takeover.expect(id)
            self.work.loops.operations.wake()

    @property
    def for_operators(self) -> AdminShard:
        """This shard, for ``outbox.admin``."""
        from outboxio.operations.recorder import AdminShard

        return AdminShard(
            self.database, self.clock, self.changed_by_hand, self.decisions_changed, self.operation_requested
        )

    def collector(self) -> Collector:
        """Return a collector of the figures of this shard, for ``outbox.admin`` and ``outbox.health()``."""
        from outboxio.health.collector import Collector

        environment = self.environment
        return Collector(
            environment.namespace, self.database, self.clock, environment.handlers, environment.settings,
            environment.redact,
        )  # fmt: skip

    def changed_by_hand(self) -> None:
        """Find rows that waited for rows that an operator or retention has ended or made due."""
        if self.work is not None:
            self.work.dispatcher.sweep_stranded_keys()
        self.became_due()

    def receive_wakeup(self, payload: str) -> None:
        """Process a wake-up of any process, possibly of this one."""
        kind, _, sender = payload.partition(" ")
        if self.work is None or sender == self.environment.owner:
            return
        if kind == WORK:
            sender, notes = _NOTES.decode(sender)
            for note in notes:
                if sender != self.environment.owner and note.to in ("", self.environment.owner):
                    self.work.dispatcher.transfers.receive(sender, note)
        elif kind == EVENTS:
            self.work.signals.fan_out.set()
        elif kind == NOTIFICATIONS:
            self.work.find_for_other_clocks()
        elif kind == MOVED:
            self.work.dispatcher.sweep_moved()
            self.work.find_for_other_clocks()
        elif kind == LOCKS:
            self.work.signals.share.set()
            self.work.loops.announce.wake()  # the decisions of operators may have changed

    async def flush_wakes(self) -> None:
        """Send the wake-ups that are due, and end the tasks of the senders."""
        for sender in self._wakes.values():
            await sender.close()

    def _wake_others(self, kind: str) -> None:
        if self.environment.settings.notify and self.database.wakes_across_processes:
            self._wakes[kind].send_soon()

    def _sender(self, kind: str) -> Callable[[], Awaitable[None]]:
        environment = self.environment
        return lambda: self.database.notify(environment.channel, f"{kind} {environment.owner}")

    async def _send_notes(self) -> None:
        notes, self._notes = self._notes[:MAX_NOTES], self._notes[MAX_NOTES:]
        payload = msgspec.json.encode((self.environment.owner, notes)).decode()
        await self.database.notify(self.environment.channel, f"{WORK} {payload}")
        if self._notes:
            self._wakes[WORK].send_soon()

    def _finished_late(self) -> None:
        """Find the rows of a stuck run that has ended. It may belong to an earlier shard run."""
        if self.work is not None:
            self.work.dispatcher.sweep_all()

    # --- work ----------------------------------------------------------------------------------

    async def prepare(self, roles: Roles) -> None:
        """Check the connections, the schema and the clock before any loop starts."""
        self.database.require_capacity(loops=2 + roles.fanout + 2 * roles.handling)
        try:
            await self.database.refuse_shared_sessions()
            await self.database.check_connections()
            await self.database.schema.check(
                loop_rights(self.database.dialect, fanout=roles.fanout, handling=roles.handling)
            )
            self._check_names()
            await self.clock.measure(self.database.now)
        except BaseException:
            await self.database.release_loops()
            raise

    def _check_names(self) -> None:
        for name in self.environment.names:
            if (reason := self.database.encoding.why_refused(name)) is not None:
                raise ConfigurationError(f"shard {self.name!r}: {name!r} {reason}")

    def start_run(self, roles: Roles, *, drains: bool = False) -> ShardRun:
        """Create the shard run of a ``running()`` or a ``drain()``."""
        from outboxio.runtime.shard_run import ShardRun

        with shared_fields(**self.log_fields):  # for the tasks of handlers
            run = self.work = ShardRun(self, roles, drains=drains)
        return run

    def takeover(self, fans_out: Callable[[], bool]) -> Takeover:
        """Return the part of a shard run that carries out background operations."""
        from outboxio.operations.takeover import Takeover

        environment = self.environment
        return Takeover(
            environment.namespace, self.for_operators, environment.owner, fans_out=fans_out,
            keep=environment.settings.keep_dead, redact=environment.redact,
        )  # fmt: skip

    def handling(self, stopping: asyncio.Event, *, inline: bool = False) -> HandlingSetup:
        """Return what handlers need to run. ``stopping``: set when handlers should finish."""
        environment = self.environment
        telemetry = environment.telemetry.chosen
        context = HandlerContext(
            namespace=environment.namespace,
            shard=self.name,
            resources=environment.resources,
            stopping=stopping,
            emitter=self.emitter,
            execute=environment.execute,
            join=environment.join,
            outbox=environment.outbox,
            redact=environment.redact,
            handler_name_of=environment.handlers.name_of,
            telemetry=telemetry.handling(environment.namespace, self.name, self.clock, inline=inline),
        )
        return HandlingSetup(
            self.database, environment.handlers, self.clock, environment.settings, context, environment.on_dead,
            self.statistics,
        )  # fmt: skip

    def for_jobs(self) -> JobSetup:
        """Return what jobs need to run."""
        from outboxio.jobs.runner import JobSetup

        environment = self.environment
        return JobSetup(
            namespace=environment.namespace, shard=self.name, database=self.database, clock=self.clock,
            emitter=self.emitter, settings=environment.settings, redact=environment.redact, outbox=environment.outbox,
            resources=environment.resources, committed=self.committed, statistics=self.statistics.jobs,
            telemetry=environment.telemetry,
        )  # fmt: skip

    def scheduler(self, run: ShardRun, *, runs: bool) -> JobScheduler:
        """Return the part of a shard run that starts jobs. ``runs``: False if this shard run starts none."""
        from outboxio.jobs.scheduler import JobScheduler

        environment = self.environment
        locks = [environment.jobs_lock] * (runs and self.keeps_jobs)
        return JobScheduler(
            self.for_jobs(), environment.jobs, environment.owner, run.stopping,
            locks=locks, holds=lambda name: run.locks.holds(name), wake=run.signals.jobs,
            transactions=lambda: run.dispatcher.for_jobs, shard_task=lambda: run.dispatcher.caller.shard_task,
        )  # fmt: skip

    def inline(self) -> InlineRunner:
        """Return the runner of handlers for ``inbox.consume``, outside of any shard run."""
        from outboxio.inbox.inline import InlineRunner

        if self._inline is None:
            setup = self.handling(asyncio.Event(), inline=True)
            self._inline = InlineRunner(setup, committed=self.committed, became_due=self.became_due)
        return self._inline

    async def close(self) -> None:
        await self.flush_wakes()
        await self.database.close()
