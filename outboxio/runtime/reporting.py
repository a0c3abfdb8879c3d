"""Reporting of a shard run: figures for metrics, rows in the database for operators, and the live state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from outboxio.handlers.described import in_texts
from outboxio.handlers.handler import Handler
from outboxio.health.reporter import Reporter
from outboxio.loops.blocked_loop import lag_of
from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.model.lock_name import LockName
from outboxio.runtime.environment import Environment, Roles
from outboxio.statistics.handlers import AnyCircuit
from outboxio.statistics.shard import lock_label
from outboxio.support import machine
from outboxio.support.clock import utc_now
from outboxio.support.log import log_of
from outboxio.version import __version__

if TYPE_CHECKING:
    from outboxio.runtime.shard_run import ShardRun

logger = log_of(__name__)

LEAVE_TIMEOUT = 5.0  # seconds


class RunReporting:
    """The reporting of one shard run. A drain only writes the figures per minute."""

    def __init__(self, run: ShardRun, roles: Roles, *, fans_out: Callable[[], bool], drains: bool) -> None:
        shard = run.shard
        environment = shard.environment
        self.live = LiveRun(run, roles)
        self.reporter = Reporter(
            environment.namespace, environment.owner, __version__, shard.database, shard.clock, shard.minutes,
            content=self.live.report, fans_out=fans_out, drains=drains,
        )  # fmt: skip
        self._collector = shard.collector()
        self._fans_out = fans_out
        self._shard = shard.name
        self._statistics = shard.statistics
        shard.statistics.follow(run.counters)
        self._expect(environment, roles, run.jobs.locks)

    def _expect(self, environment: Environment, roles: Roles, of_jobs: Sequence[LockName]) -> None:
        """Register the locks, handlers and jobs of this process, so that metrics show them from the start."""
        if roles.fanout:
            self._statistics.expect_lock(environment.fanout_lock)
        for handler in environment.handlers.to_run if roles.handling else ():
            self._statistics.expect_lock(LockName(environment.namespace, "dispatch", handler.name))
            self._statistics.expect_handler(handler.name, handler.options.alert_age)
        for lock in of_jobs:
            self._statistics.expect_lock(lock)
            for name in environment.jobs:
                self._statistics.jobs.of(name)

    def shown(self) -> AbstractContextManager[None]:
        """Show the shard run in metrics while the block lasts."""
        return self._statistics.showing(self.live)

    async def read_figures(self) -> RoundResult:
        """Read the figures of the tables, if metrics need them and this process fans out."""
        is_needed = self._statistics.figures_wanted and self._fans_out()
        try:
            self._statistics.figures = await self._collector.figures() if is_needed else None
        except BaseException:
            self._statistics.figures = None  # outdated figures would hide that the tables cannot be read
            raise
        return NOTHING

    async def leave(self) -> None:
        """Write the last figures and remove the report of this process, within 5 s: the database may be unavailable."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await self.reporter.leave()
        except Exception as error:
            logger.warning(
                "could not write the last report of this process to shard %s: %s", self._shard, error, shard=self._shard
            )


class LiveRun:
    """See :class:`~outboxio.statistics.shard.Live`."""

    def __init__(self, run: ShardRun, roles: Roles) -> None:
        self._run = run
        self._shard = run.shard
        self._loop = asyncio.get_running_loop()
        self._full_since: datetime | None = None
        self.roles: Sequence[str] = [name for name in Roles.__struct_fields__ if getattr(roles, name)]
        known = {one.name: in_texts(one.options) for one in self._shard.environment.handlers.to_run}
        self._options = {name: options for name, options in known.items() if options}

    @property
    def loop_lag(self) -> float:
        return lag_of(self._loop)

    @property
    def connections_in_use(self) -> int:
        return self._shard.database.connections_in_use

    @property
    def paused(self) -> Sequence[str]:
        return self._run.dispatcher.paused

    def report(self) -> dict[str, Any]:
        """Return the content of this process's row in ``instance_reports``."""
        now, dispatcher, statistics = self._shard.clock(), self._run.dispatcher, self._shard.statistics
        handles = "handling" in self.roles
        handlers = self._shard.environment.handlers.to_run if handles else []
        return {
            "roles": self.roles,
            **self._jobs(statistics.locks_held),
            "host": machine.host(),
            "pid": machine.pid(),
            "loop_lag": round(self.loop_lag, 6),
            "clock_offset": self._clock_offset(),
            **self._full_pool(now),
            "locks": {lock: number for lock, number in statistics.locks_held.items() if number},
            "paused": self.paused if handles else [],
            "handlers": {handler.name: self._handler(handler) for handler in handlers},
            "options": self._options if handles else {},
            "stuck": [
                {
                    "handler": run.handler,
                    "event_id": run.event_id,
                    "since": (now - timedelta(seconds=run.seconds)).isoformat(),
                    "seconds": round(run.seconds, 3),
                    "at": run.source,
                }
                for run in dispatcher.stuck_runs()
            ],
        }

    def _full_pool(self, now: datetime) -> dict[str, Any]:
        """Return the size of the pool, and since when every report has found all its connections in use."""
        size = self._shard.database.pool_size
        is_full = 0 < size <= self.connections_in_use
        self._full_since = (self._full_since or now) if is_full else None
        since = self._full_since
        return {} if since is None else {"full_pool": {"size": size, "since": since.isoformat()}}

    def _handler(self, handler: Handler) -> dict[str, Any]:
        statistics = self._shard.statistics.of(handler.name)
        subscriptions = self._shard.environment.handlers.subscriptions_of(handler)
        return {
            "in_flight": statistics.in_flight,
            "limit": statistics.limit or 0,
            "stuck": statistics.stuck,
            "alert_age": statistics.alert_age,
            **self._circuit(statistics.circuit),
            **({"limited_to": str(handler.options.rate)} if statistics.is_rate_limited else {}),
            **_batch(handler),
            "types": sorted(one.event_type for one in subscriptions if one.event_type),
        }

    def _jobs(self, held: Mapping[str, int]) -> dict[str, Any]:
        """The jobs that this process runs, if it holds their lock."""
        environment = self._shard.environment
        return {"jobs": sorted(environment.jobs)} if held.get(lock_label(environment.jobs_lock)) else {}

    def _circuit(self, circuit: AnyCircuit | None) -> dict[str, Any]:
        """Return since when and why the circuit breaker of a handler is open."""
        if circuit is None:
            return {}
        since = self._shard.clock() - timedelta(seconds=self._loop.time() - circuit.since)
        return {"rest": {"since": since.isoformat(), "reason": circuit.reason}}

    def _clock_offset(self) -> float | None:
        """Return by how many seconds the clock of this host is ahead of the database; ``None`` if unknown."""
        clock = self._shard.clock
        if clock.is_user_supplied or clock.offset is None:
            return None
        return round((utc_now() - clock()).total_seconds(), 6)


def _batch(handler: Handler) -> dict[str, Any]:
    """Return what due rows of a batch handler may wait for."""
    batch = handler.options.batch
    if batch is None:
        return {}
    return {"max_wait": batch.longest_wait} if batch.schedule is None else {"schedule": batch.schedule}
