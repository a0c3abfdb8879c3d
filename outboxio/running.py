"""One stay in ``running()``: every shard at work, until the last block that shares it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from outboxio.errors import ConfigurationError, DatabaseUnavailable, ShutdownError
from outboxio.shard import Roles, ShardRuntime, ShardWork
from outboxio.waiting import to_the_end

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Running:
    """Starts the shards, and stops them.

    The shards run in a task of their own, for a task group must be left by the task that entered it, and ``running()``
    may be left by another.
    """

    def __init__(
        self,
        shards: list[ShardRuntime],
        roles: Roles,
        refuse_same_database: Callable[[list[ShardRuntime]], Awaitable[None]],
    ) -> None:
        self._shards = shards
        self._roles = roles
        self._refuse_same_database = refuse_same_database
        self._blocks = 1
        self._stopping = False
        self._works: list[ShardWork] = []
        self._problems: list[Exception] = []
        self._task: asyncio.Task[None] | None = None

    def join(self, roles: Roles) -> None:
        """Another block shares this stay."""
        if (roles.fanout and not self._roles.fanout) or (roles.handling and not self._roles.handling):
            raise ConfigurationError(
                f"running() is entered already as {self._roles} and cannot be {roles} as well; enter it once with all"
            )
        self._blocks += 1

    @property
    def has_begun(self) -> bool:
        """Whether the shards are at work, rather than being prepared."""
        return self._task is not None

    @property
    def is_over(self) -> bool:
        """Whether its event loop ended before it was left."""
        return self._task is not None and self._task.done()

    def part(self) -> bool:
        """A block ends; whether it was the last one."""
        self._blocks -= 1
        return self._blocks <= 0

    async def start(self) -> None:
        """Check every shard, announce the handlers, and let the loops begin."""
        ready: list[ShardRuntime] = []
        down: dict[str, DatabaseUnavailable] = {}
        try:
            for shard in self._shards:
                try:
                    await shard.prepare(self._roles)
                    ready.append(shard)
                except DatabaseUnavailable as error:
                    down[shard.name] = error
            if not ready:
                raise next(iter(down.values()))
            await self._refuse_same_database(ready)
            for shard in ready:
                self._works.append(shard.start_work(self._roles))
                await self._works[-1].announcer.announce_if_due()
        except BaseException:
            await to_the_end(self._abandon())
            raise
        for name, reason in down.items():
            logger.error("shard %s is down and is probed until it comes: %s", name, reason)
            self._works.append(self._shard(name).start_work(self._roles))
        self._task = asyncio.create_task(self._run(set(down)), name="outboxio running")

    async def _abandon(self) -> None:
        for shard in self._shards:
            shard.work = None
            await shard.database.release_loops()

    async def stop(self) -> None:
        """Wind all shards down; raises :class:`ShutdownError` if outcomes were lost on the way."""
        self._stopping = True
        for work in self._works:
            work.leave()
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
                for work in self._works:
                    group.create_task(self._run_one(work, unprepared=work.name in down))
        finally:
            for shard in self._shards:
                shard.work = None

    async def _run_one(self, work: ShardWork, *, unprepared: bool) -> None:
        """What befalls one shard must not cut the others short, so it is raised when all have ended."""
        try:
            await work.run(unprepared=unprepared)
        except Exception as error:
            self._problems.append(error)
            if not self._stopping:
                logger.critical("all loops of shard %s have ended, its events wait", work.name, exc_info=error)

    def _shard(self, name: str) -> ShardRuntime:
        return next(shard for shard in self._shards if shard.name == name)

    @staticmethod
    def _raise_problem(group: BaseExceptionGroup[BaseException]) -> None:
        lost, others = group.split(ShutdownError)
        if others is not None:
            raise others
        assert lost is not None
        ids = [i for error in _leaves(lost) if isinstance(error, ShutdownError) for i in error.notification_ids]
        raise ShutdownError(ids) from group


class Stay(Generic[T]):
    """One ``async with outbox.running()``; holds no task, so it can be left from anywhere."""

    def __init__(self, enter: Callable[[], Awaitable[T]], leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._enter = enter
        self._leave = leave

    async def __aenter__(self) -> T:
        return await self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await to_the_end(self._leave())


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            found.append(error)
    return found
