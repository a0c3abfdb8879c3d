"""A shard, for as long as the outbox exists: a database, a clock, and the wake-ups that go in and out.

Shards share only the handlers, so a dead or slow shard delays no other shard. The loops of a shard belong to a
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
from outboxio.storage.schema import working
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
WORK = "work"  # with notes: a pair of the sender and a list
MOST_NOTES = 10  # of a message, which has room for 8,000 bytes on PostgreSQL
_NOTES = msgspec.json.Decoder(tuple[str, list[WorkNote]])


class ShardRuntime:
    """A database of an outbox.

    A process that only writes events needs neither dispatch nor inbox, jobs or operators: the methods that make these
    parts import them.
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
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the objects of the former event loop, because a new event loop takes over."""
        self._wakes = {
            kind: WakeupSender(self._sender(kind), self.name) for kind in (EVENTS, NOTIFICATIONS, LOCKS, MOVED)
        }
        self._wakes[WORK] = WakeupSender(self._send_notes, self.name)
        self._notes: list[WorkNote] = []
        self.work: ShardRun | None = None
        self._inline: InlineRunner | None = None
        self.stuck = StuckRows(self._came_back)
        self.statistics.begin_anew()

    @cached_property
    def minutes(self) -> MinuteKeeper:
        """The runs of each minute, for the table."""
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
        """This process has committed events: wake fan-out here, and in the fleet if this process does not fan out.

        ``events``: the committed events, if the caller knows the events.
        """
        if self.work is not None:
            self.work.fanout.expect(events)
            self.work.signals.fan_out.set()
        if self.work is None or not self.work.fans_out:
            self._wake_others(EVENTS)

    def became_due(self) -> None:
        """Notifications were made, or made due. Any process may have the handlers."""
        if self.work is not None:
            self.work.signals.find.set()
        self._wake_others(NOTIFICATIONS)

    def unblocked(self) -> None:
        """The dispatcher has made notifications due. It needs no wake-up for handlers of this process."""
        self._wake_others(NOTIFICATIONS)

    def moved(self) -> None:
        """After a change of the number of partitions, notifications became due behind the reads of other processes."""
        self._wake_others(MOVED)

    def send_note(self, note: WorkNote) -> None:
        """Tell other processes which rows wait here, or that runs are free."""
        self._notes.append(note)
        self._wake_others(WORK)

    def gave_back(self) -> None:
        """This process has given locks of shared handlers back, or leaves."""
        self._wake_others(LOCKS)

    def decisions_changed(self) -> None:
        """An operator has set a number of partitions, or cancels a run: read it, here and in all processes."""
        if self.work is not None:
            self.work.loops.announce.wake()
        self._wake_others(LOCKS)

    def operation_ordered(self, id: UUID) -> None:
        """An operator has ordered an operation in the background, or its end: this process takes it, if it runs."""
        if self.work is not None:
            self.work.loops.takeover.expect(id)
            self.work.loops.operations.wake()

    @property
    def for_operators(self) -> AdminShard:
        """This shard, as ``outbox.admin`` reaches the shard."""
        from outboxio.operations.recorder import AdminShard

        return AdminShard(
            self.database, self.clock, self.changed_by_hand, self.decisions_changed, self.operation_ordered
        )

    def collector(self) -> Collector:
        """Reads the facts of this shard, for ``outbox.admin`` and ``outbox.health()``."""
        from outboxio.health.collector import Collector

        environment = self.environment
        return Collector(
            environment.namespace, self.database, self.clock, environment.handlers, environment.settings,
            environment.redact,
        )  # fmt: skip

    def changed_by_hand(self) -> None:
        """An operator or retention has ended rows, or made rows due. Other rows may have waited for that."""
        if self.work is not None:
            self.work.dispatcher.sweep_stranded_keys()
        self.became_due()

    def heard(self, payload: str) -> None:
        """A wake-up of any process has come, perhaps of this process."""
        kind, _, sender = payload.partition(" ")
        if self.work is None or sender == self.environment.owner:
            return
        if kind == WORK:
            sender, notes = _NOTES.decode(sender)
            for note in notes:
                if sender != self.environment.owner and note.to in ("", self.environment.owner):
                    self.work.dispatcher.transfers.heard(sender, note)
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
        """Send the wake-ups that are due, and end the sender's tasks."""
        for sender in self._wakes.values():
            await sender.close()

    def _wake_others(self, kind: str) -> None:
        if self.environment.settings.notify and self.database.wakes_across_processes:
            self._wakes[kind].send_soon()

    def _sender(self, kind: str) -> Callable[[], Awaitable[None]]:
        environment = self.environment
        return lambda: self.database.notify(environment.channel, f"{kind} {environment.owner}")

    async def _send_notes(self) -> None:
        notes, self._notes = self._notes[:MOST_NOTES], self._notes[MOST_NOTES:]
        payload = msgspec.json.encode((self.environment.owner, notes)).decode()
        await self.database.notify(self.environment.channel, f"{WORK} {payload}")
        if self._notes:
            self._wakes[WORK].send_soon()

    def _came_back(self) -> None:
        """A stuck run has ended. The run may belong to an earlier shard run."""
        if self.work is not None:
            self.work.dispatcher.sweep_all()

    # --- work ----------------------------------------------------------------------------------

    async def prepare(self, roles: Roles) -> None:
        """Check the connections, the schema and the clock before any loop begins."""
        self.database.require_room(loops=2 + roles.fanout + 2 * roles.handling)
        try:
            await self.database.refuse_shared_sessions()
            await self.database.check_connections()
            await self.database.schema.check(
                working(self.database.dialect, fanout=roles.fanout, handling=roles.handling)
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
        """Make the parts of a ``running()``, or of a ``drain()``."""
        from outboxio.runtime.shard_run import ShardRun

        with shared_fields(**self.log_fields):  # for the tasks of handlers
            run = self.work = ShardRun(self, roles, drains=drains)
        return run

    def takeover(self, fans_out: Callable[[], bool]) -> Takeover:
        """The part of a shard run that carries out the operations that wait for a process."""
        from outboxio.operations.takeover import Takeover

        environment = self.environment
        return Takeover(
            environment.namespace, self.for_operators, environment.owner, fans_out=fans_out,
            keep=environment.settings.keep_dead, redact=environment.redact,
        )  # fmt: skip

    def handling(self, stopping: asyncio.Event, *, inline: bool = False) -> HandlingSetup:
        """The parts that handlers work with. ``stopping``: set when handlers should come to an end."""
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
        """The parts that jobs work with."""
        from outboxio.jobs.runner import JobSetup

        environment = self.environment
        return JobSetup(
            namespace=environment.namespace, shard=self.name, database=self.database, clock=self.clock,
            emitter=self.emitter, settings=environment.settings, redact=environment.redact, outbox=environment.outbox,
            resources=environment.resources, committed=self.committed, statistics=self.statistics.jobs,
            telemetry=environment.telemetry,
        )  # fmt: skip

    def scheduler(self, run: ShardRun, *, runs: bool) -> JobScheduler:
        """The part of a shard run that starts jobs. ``runs``: False for a shard run that leaves jobs to others."""
        from outboxio.jobs.scheduler import JobScheduler

        environment = self.environment
        locks = [environment.jobs_lock] * (runs and self.keeps_jobs)
        return JobScheduler(
            self.for_jobs(), environment.jobs, environment.owner, run.stopping,
            locks=locks, holds=lambda name: run.locks.holds(name), wake=run.signals.jobs,
            transactions=lambda: run.dispatcher.for_jobs, home=lambda: run.dispatcher.caller.home,
        )  # fmt: skip

    def inline(self) -> InlineRunner:
        """The runner of handlers for ``inbox.consume``, outside of any shard run."""
        from outboxio.inbox.inline import InlineRunner

        if self._inline is None:
            setup = self.handling(asyncio.Event(), inline=True)
            self._inline = InlineRunner(setup, committed=self.committed, became_due=self.became_due)
        return self._inline

    async def close(self) -> None:
        await self.flush_wakes()
        await self.database.close()
