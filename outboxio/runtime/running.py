"""``running()``: all shards work until the last ``async with`` block that shares the run has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from outboxio.errors import ConfigurationError, DatabaseUnavailable, SameDatabase, ShutdownError
from outboxio.handlers.finding_hooks import FindingHook
from outboxio.model.lock_name import LockName
from outboxio.runtime.environment import Roles
from outboxio.runtime.shard import ShardRuntime
from outboxio.storage.protocols import ClusterLock
from outboxio.storage.unavailable import as_unavailable
from outboxio.support import machine
from outboxio.support.aio import run_to_completion
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from outboxio.health.notices import FindingWatch
    from outboxio.runtime.shard_run import ShardRun

T = TypeVar("T")
Leave = Callable[[], Coroutine[Any, Any, None]]

logger = log_of(__name__)


class Running:
    """Starts and stops the shards.

    The shards run in a separate task, because a task group must be left by the task that entered it, but ``running()``
    may be left by any task.
    """

    def __init__(self, shards: list[ShardRuntime], roles: Roles, hooks: Mapping[str, FindingHook]) -> None:
        self._shards = shards
        self._hooks = hooks
        self._watching: list[asyncio.Task[None]] = []
        self._roles = roles
        self._blocks = 1
        self._stopping = False
        self._runs: list[ShardRun] = []
        self._problems: list[Exception] = []
        self._task: asyncio.Task[None] | None = None

    def join(self, roles: Roles) -> None:
        """Let another block share this run."""
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
        """True if the run has ended without being left, because its event loop ended."""
        return self._task is not None and self._task.done()

    @property
    def runs(self) -> Sequence[ShardRun]:
        """The shard runs."""
        return self._runs

    @property
    def problems(self) -> Sequence[Exception]:
        """The errors that ended shards."""
        return self._problems

    @property
    def is_in_last_block(self) -> bool:
        """True if a single block shares this run."""
        return self._blocks <= 1

    def release(self) -> bool:
        """End a block. Return True for the last one."""
        self._blocks -= 1
        return self._blocks <= 0

    async def start(self) -> None:
        """Check every shard, announce the handlers, and start the loops. An unavailable shard is retried later."""
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
            await run_to_completion(self._abandon())
            raise
        for name, reason in down.items():
            logger.error("shard %s is unavailable; retrying until it can be reached: %s", name, reason, shard=name)
        self._runs += [shard.start_run(self._roles) for shard in self._shards if shard not in ready]
        self._task = asyncio.create_task(self._run(set(down)), name="outboxio running")
        for watch in finding_watches(self._shards, self._hooks):
            self._watching.append(asyncio.create_task(watch.run(), name="outboxio findings"))

    async def _abandon(self) -> None:
        for shard in self._shards:
            shard.work = None
            await shard.database.release_loops()

    async def stop(self) -> None:
        """Shut all shards down. Raises :class:`ShutdownError` if outcomes were lost."""
        self._stopping = True
        for run in self._runs:
            run.leave()
        for watching in self._watching:
            watching.cancel()
        if self._watching:
            await asyncio.wait(self._watching, timeout=_LONGEST_LEAVE)
        assert self._task is not None
        try:
            await self._task
        finally:
            for shard in self._shards:
                await shard.flush_wakes()
        if self._problems:
            self._raise_problem(ExceptionGroup("errors while the shards stopped", self._problems))

    async def _run(self, down: set[str]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for run in self._runs:
                    group.create_task(self._run_one(run, unprepared=run.name in down))
        finally:
            for shard in self._shards:
                shard.work = None

    async def _run_one(self, run: ShardRun, *, unprepared: bool) -> None:
        """Run a shard. An error must not cancel the other shards, so :meth:`stop` raises it at the end."""
        try:
            await run.drive(unprepared=unprepared)
        except Exception as error:
            self._problems.append(error)
            if not self._stopping:
                logger.critical(
                    "all loops of shard %s have stopped; its events wait", run.name, exc_info=error, shard=run.name
                )

    @staticmethod
    def _raise_problem(group: BaseExceptionGroup[BaseException]) -> None:
        lost, other = group.split(ShutdownError)
        if other is not None:
            raise other
        assert lost is not None
        ids = [i for error in _leaves(lost) if isinstance(error, ShutdownError) for i in error.notification_ids]
        raise ShutdownError(ids) from group


class RunHandle(Generic[T]):
    """The context manager of ``outbox.running()``. Any task may leave the block."""

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
        await run_to_completion(self._leave())


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            found.append(error)
    return found


_LONGEST_LEAVE = 5.0  # seconds: a user function may ignore its cancellation


def finding_watches(
    shards: Sequence[ShardRuntime], receivers: Mapping[str, FindingHook], **options: Any
) -> list[FindingWatch]:
    """Return a watch for each receiver of findings. They share the evaluations."""
    if not receivers:
        return []
    from outboxio.health.notices import FindingWatch, Watched
    from outboxio.health.overview import OverviewReader

    environment = shards[0].environment
    overviews = OverviewReader(environment.namespace, [shard.collector() for shard in shards])
    watched = Watched(environment.namespace, environment.owner, shards[0].database, overviews)
    return [FindingWatch(watched, receiver, deliver, **options) for receiver, deliver in receivers.items()]


_HEARTBEAT = 10.0  # seconds, far longer than the probe takes


async def refuse_same_database(shards: Sequence[ShardRuntime]) -> None:
    """Raise :class:`SameDatabase` if two shards are in the same database.

    Each shard tries a lock with the same random name. The second shard of a database cannot acquire it.
    """
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
        await run_to_completion(_close_all(lock for _, lock in locks))


async def _close_all(locks: Iterable[ClusterLock]) -> None:
    for lock in locks:
        await lock.close()
