"""The parts of a shard run that tell numbers: to metrics, and to operators by rows of the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from outboxio.model.lock_name import LockName
from outboxio.operations.reporting.figures import FigureReader
from outboxio.operations.reporting.reporter import Reporter
from outboxio.runtime.environment import Environment, Roles
from outboxio.runtime.reporting.live import LiveRun
from outboxio.support.log import log_of
from outboxio.version import __version__

if TYPE_CHECKING:
    from outboxio.runtime.shard_run import ShardRun

logger = log_of(__name__)

LONGEST_FAREWELL = 5.0  # seconds


class RunReporting:
    """Made for each shard run. A drain writes the figures by minute only."""

    def __init__(self, run: ShardRun, roles: Roles, *, fans_out: Callable[[], bool], drains: bool) -> None:
        shard = run.shard
        environment = shard.environment
        self.live = LiveRun(run, roles)
        self.reporter = Reporter(
            environment.namespace, environment.owner, __version__, shard.database, shard.clock, shard.minutes,
            content=self.live.report, fans_out=fans_out, drains=drains,
        )  # fmt: skip
        self.figures = FigureReader(
            environment.namespace, shard.database, environment.handlers, shard.clock, shard.statistics,
            fans_out=fans_out, seen_since=run.announcer.seen_since,
        )  # fmt: skip
        self._shard = shard.name
        self._statistics = shard.statistics
        shard.statistics.follow(run.counters)
        self._expect(environment, roles, run.jobs.locks)

    def _expect(self, environment: Environment, roles: Roles, of_jobs: Sequence[LockName]) -> None:
        """The locks, handlers and jobs of this process, which metrics show before anything has happened."""
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

    async def leave(self) -> None:
        """Write the last numbers, and remove the report of this process, within 5 s: the database may be gone."""
        try:
            async with asyncio.timeout(LONGEST_FAREWELL):
                await self.reporter.leave()
        except Exception as error:
            logger.warning(
                "shard %s has not got the last report of this process: %s", self._shard, error, shard=self._shard
            )
