"""The values of ``outbox.health()``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from outboxio.errors import DatabaseUnavailable, SchemaError, SchemaNewer
from outboxio.runtime.lifecycle import Phase
from outboxio.runtime.shard import ShardRuntime
from outboxio.support import machine
from outboxio.support.log import log_of, log_text, type_name
from outboxio.support.text import without_passwords

Status = Literal["ok", "degraded", "down"]
Fit = Literal["fits", "missing", "newer", "unknown"]

SEVERITY: Mapping[Status, int] = {"ok": 0, "degraded": 1, "down": 2}


class ShardHealth(Struct, frozen=True, kw_only=True):
    """A shard, as this process sees the shard.

    - ``reachable``: ``None`` if the database was not asked yet.
    - ``schema``: "fits"; "missing" if a table, a part of a table or a right is missing; "newer" if a newer outboxio has
      migrated the tables; "unknown" if the database was not asked yet.
    - ``clock_offset``: the seconds by which the clock of the database is ahead of the clock of this machine; ``None``
      if the offset is not measured, or the clock is the application's.
    - ``locks_held``, ``locks_lacking``: the cluster locks that this process holds, and the locks that it tries. A
      process without a lock is a healthy standby.
    """

    reachable: bool | None = None
    schema: Fit = "unknown"
    clock_offset: float | None = None
    locks_held: Sequence[str] = ()
    locks_lacking: Sequence[str] = ()


class LoopHealth(Struct, frozen=True, kw_only=True):
    """A loop of ``running()``.

    - ``last_round_age``: the seconds since the end of the last round; ``None`` before the first end.
    - ``failures``: the failed rounds since the last good round.
    - ``waits_for_database``: True if a round goes on, and waits for an answer of the database.
    """

    last_round_age: float | None = None
    failures: int = 0
    waits_for_database: bool = False


class Health(Struct, frozen=True, kw_only=True):
    """The health of an outbox in this process, and of the tables that the outbox works on.

    - ``status``: "ok"; "degraded" if a part needs attention; "down" if nothing works.
    - ``live``: False if this process has to be restarted: its event loop does not answer for 5 s, or a task of
      ``running()`` has ended. A database that is down, a backlog, dead letters and lacking locks leave it True.
    - ``ready``: True inside ``running()``, if the tables of a shard fit and the shard has answered within 30 s. False
      as soon as the outbox is left.
    - ``reasons``: why the process is not live, not ready, or not "ok", the worst reason first. Empty if all is well.
    - ``phase``: "stopped", "starting", "running" or "leaving".
    - ``shards``, ``loops``: by the name of the shard, and by the name of the loop.
    - ``lag``: the age of the oldest event without notifications, in seconds.
    - ``oldest_due``: for how many seconds the oldest due notification of a handler has waited, by handler name.
    - ``stuck``: the rows of runs that ignore their cancellation, in this process.
    - ``unroutable``: the notifications for a handler, or for a version of their event, that no process has.

    ``None``: the figure is not known.
    """

    status: Status
    live: bool
    ready: bool
    reasons: Sequence[str]
    phase: Phase
    shards: Mapping[str, ShardHealth]
    loops: Mapping[str, LoopHealth]
    lag: float | None = None
    oldest_due: Mapping[str, float] = {}
    stuck: int = 0
    unroutable: int | None = None


# --- what the database says -----------------------------------------------------------------------
#
# What the database says: asked at most once in 5 s, within 1 s, however many callers wait for the answer.


logger = log_of(__name__)

FRESH = 5.0  # seconds for which an answer is used again, a failure too
TIMEOUT = 1.0  # seconds
CHECKED_AGAIN = 60.0  # seconds between two complete checks of the tables, by a process outside of running()


class ShardAnswer(Struct, frozen=True, kw_only=True):
    """The end of a question to a shard."""

    asked: float
    """When the question began, by the event loop's clock."""
    answered: bool = False
    refused: bool = False
    """True if the shard cannot be reached. A question without an end in time is neither answered nor refused."""
    fit: Fit = "unknown"


class Told(Struct, frozen=True):
    """A fault that a rule has found in the tables."""

    rule: str
    level: Status
    text: str


class Figures(Struct, frozen=True, kw_only=True):
    """The figures of the tables, and the faults in them."""

    findings: Sequence[Told] = ()
    """The worst first."""
    lag: float | None = None
    oldest_due: Mapping[str, float] = {}
    unroutable: int | None = None
    missing: str | None = None
    """Why there are no figures although the database was asked."""


class FigureSource(Protocol):
    """Reads the figures of all shards. May raise the errors of a database."""

    async def figures(self) -> Figures:
        """Read the figures."""
        ...


class Answers(Struct, frozen=True, kw_only=True):
    """The last answers of the database."""

    shards: Mapping[str, ShardAnswer] = {}
    figures: Figures = Figures()


class Questions:
    """Asks the database, and keeps the answers."""

    def __init__(self, namespace: str, shards: Mapping[str, ShardRuntime], source: FigureSource | None) -> None:
        self._namespace = namespace
        self._shards = shards
        self._source = source
        self._is_told = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the answers and the lock of a former event loop."""
        self.last = Answers()
        self._read_at = float("-inf")
        self._checked: dict[str, float] = {}
        self._turn = asyncio.Lock()

    async def answers(self, patience: float = TIMEOUT) -> Answers:
        """The answers of the last 5 s, or new answers within ``patience`` seconds. Never raises a database's error."""
        if self._is_old():
            async with self._turn:
                if self._is_old():
                    self.last = await self._ask(patience)
                    self._read_at = machine.monotonic()
        return self.last

    def _is_old(self) -> bool:
        return machine.monotonic() - self._read_at >= FRESH

    async def _ask(self, patience: float) -> Answers:
        began = machine.monotonic()
        answers = await asyncio.gather(*(self._ask_shard(name, patience) for name in self._shards))
        shards = dict(zip(self._shards, answers, strict=True))
        left = began + patience - machine.monotonic()
        figures = Figures(missing=f"no shard has answered within {patience:g} s")
        if any(answer.answered for answer in answers):
            figures = await self._figures(left, patience)
        return Answers(shards=shards, figures=figures)

    async def _figures(self, left: float, patience: float) -> Figures:
        """The figures, within the seconds ``left`` of ``patience``."""
        if self._source is None:
            return Figures()
        limit = asyncio.timeout(left)
        try:
            async with limit:
                figures = await self._source.figures()
        except Exception as error:
            if limit.expired():
                return Figures(missing=f"the overview was not read within {patience:g} s")
            level = logging.DEBUG if self._is_told else logging.WARNING
            logger.log(level, "the figures of health() could not be read: %s", error, error_type=type_name(error))
            self._is_told = True
            return Figures(missing=f"the overview could not be read: {without_passwords(log_text(error))}")
        self._is_told = False
        return figures

    async def _ask_shard(self, name: str, patience: float) -> ShardAnswer:
        shard, asked = self._shards[name], asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(patience):
                await self._question(shard)
        except TimeoutError:
            return ShardAnswer(asked=asked)
        except Exception as error:
            logger.debug("shard %s does not answer the question of health(): %s", name, error)
            is_unreachable = isinstance(error, DatabaseUnavailable) or shard.database.is_unreachable(error)
            fit: Fit = "missing" if shard.database.lacks_schema(error) else fit_of(error)
            return ShardAnswer(asked=asked, answered=not is_unreachable, refused=is_unreachable, fit=fit)
        return ShardAnswer(asked=asked, answered=True, fit="fits")

    async def _question(self, shard: ShardRuntime) -> None:
        """A short statement on a small table.

        A process in ``running()`` has checked the tables at the start. Later a newer version may migrate the tables
        while this process goes on, so only a process outside of ``running()`` checks the tables.
        """
        if shard.work is None and machine.monotonic() - self._checked.get(shard.name, float("-inf")) >= CHECKED_AGAIN:
            await shard.database.schema.check()
            self._checked[shard.name] = machine.monotonic()
        await shard.clock.measure(shard.database.now)
        await shard.database.subscriptions.pauses(self._namespace)


def fit_of(error: Exception) -> Fit:
    """How the tables fit, by the error of a check."""
    if isinstance(error, SchemaNewer):
        return "newer"
    return "missing" if isinstance(error, SchemaError) else "unknown"
