"""A shard run as metrics and operators see the shard run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outboxio.handlers.handler import Handler
from outboxio.loops.standstill import lag_of
from outboxio.runtime.environment import Roles
from outboxio.statistics.handlers import AnyRest
from outboxio.support import machine
from outboxio.support.clock import utc_now

if TYPE_CHECKING:
    from outboxio.runtime.shard_run import ShardRun


class LiveRun:
    """See :class:`~outboxio.statistics.shard.Live`."""

    def __init__(self, run: ShardRun, roles: Roles) -> None:
        self._run = run
        self._shard = run.shard
        self._home = asyncio.get_running_loop()
        self.roles: Sequence[str] = [name for name in Roles.__struct_fields__ if getattr(roles, name)]

    @property
    def loop_lag(self) -> float:
        return lag_of(self._home)

    @property
    def connections_in_use(self) -> int:
        return self._shard.database.connections_in_use

    @property
    def paused(self) -> Sequence[str]:
        return self._run.dispatcher.paused

    def report(self) -> dict[str, Any]:
        """The content of this process's row in ``instance_reports``."""
        now, dispatcher, statistics = self._shard.clock(), self._run.dispatcher, self._shard.statistics
        handles = "handling" in self.roles
        handlers = self._shard.environment.handlers.to_run if handles else []
        return {
            "roles": self.roles,
            "host": machine.host(),
            "pid": machine.pid(),
            "loop_lag": round(self.loop_lag, 6),
            "clock_offset": self._clock_offset(),
            "locks": {lock: number for lock, number in statistics.locks_held.items() if number},
            "paused": self.paused if handles else [],
            "handlers": {handler.name: self._handler(handler) for handler in handlers},
            "stuck": [
                {
                    "handler": run.handler,
                    "event_id": run.event_id,
                    "since": (now - timedelta(seconds=run.seconds)).isoformat(),
                    "seconds": round(run.seconds, 3),
                    "at": run.place,
                }
                for run in dispatcher.stuck_runs()
            ],
        }

    def _handler(self, handler: Handler) -> dict[str, Any]:
        statistics = self._shard.statistics.of(handler.name)
        wanted = self._shard.environment.handlers.wanted_by(handler)
        return {
            "in_flight": statistics.in_flight,
            "limit": statistics.limit or 0,
            "stuck": statistics.stuck,
            "alert_age": statistics.alert_age,
            **self._rest(statistics.rest),
            "types": sorted(one.event_type for one in wanted if one.event_type),
        }

    def _rest(self, rest: AnyRest | None) -> dict[str, Any]:
        """Since when and why a handler rests, if it does."""
        if rest is None:
            return {}
        since = self._shard.clock() - timedelta(seconds=self._home.time() - rest.since)
        return {"rest": {"since": since.isoformat(), "reason": rest.reason}}

    def _clock_offset(self) -> float | None:
        """The seconds by which the wall clock of this host is ahead of the database; ``None`` if that is not known."""
        clock = self._shard.clock
        if clock.is_given or clock.offset is None:
            return None
        return round((utc_now() - clock()).total_seconds(), 6)
