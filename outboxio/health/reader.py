"""The figures and the verdict of ``outbox.admin.overview()``, for ``outbox.health()``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from msgspec.structs import replace

from outboxio.health.values import TIMEOUT, Answers, Figures, FigureSource, Health, Questions, Told
from outboxio.health.verdict import LONG_STANDSTILL, Moment, judge, remembered
from outboxio.loops.owner import EventLoopGuard
from outboxio.loops.standstill import silence_of
from outboxio.operations.overview.values import Overview
from outboxio.runtime.lifecycle import Lifecycle
from outboxio.runtime.shard import ShardRuntime
from outboxio.support import machine

_TOLD_BY_HEALTH = {"shard_unreachable", "schema_behind"}


class OverviewSource:
    """Reads the overview. What health itself says of shards is left out."""

    def __init__(self, read: Callable[[], Awaitable[Overview]]) -> None:
        self._read = read

    async def figures(self) -> Figures:
        """See :class:`~outboxio.health.values.FigureSource`."""
        overview = await self._read()
        return Figures(
            findings=[
                Told(rule=finding.rule, level=finding.level, text=finding.sentence)
                for finding in overview.findings
                if finding.rule not in _TOLD_BY_HEALTH
            ],
            lag=overview.figures.oldest_undelivered,
            oldest_due={one.handler_name: one.oldest_due for one in overview.handlers if one.oldest_due is not None},
            unroutable=overview.figures.unroutable,
            missing=next((f"{error} (shard {one.shard!r})" for one in overview.shards if (error := one.error)), None),
        )


# --- ``outbox.health()`` --------------------------------------------------------------------------
#
# ``outbox.health()``: reads the health in the event loop of the outbox, or notices that this loop does not answer.
#
# Loops, locks and connections belong to the event loop that the outbox is bound to. A caller in this loop reads at
# once.
# A caller in a second event loop, such as an application with health pages in a thread of their own, lets the outbox's
# loop read. A loop that does not answer for 5 s is dead: a handler blocks the loop, and nothing else goes on.


_LOOK = 0.25  # seconds between two looks at an event loop that does not answer
_TURNS = 3  # of the event loop, in which loops that are late after a standstill begin a round


class HealthReader:
    """Reads the health of an outbox."""

    def __init__(
        self,
        namespace: str,
        lifecycle: Lifecycle,
        shards: Mapping[str, ShardRuntime],
        guard: EventLoopGuard,
        source: FigureSource | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._shards = shards
        self._guard = guard
        self._questions = Questions(namespace, shards, source)
        self._last: Health | None = None
        guard.when_taken_over(self._begin_anew)

    def _begin_anew(self) -> None:
        self._questions.begin_anew()
        self._last = None

    async def read(self, patience: float = TIMEOUT) -> Health:
        """The health, with the answers of the database within ``patience`` seconds.

        Binds an outbox that was not used yet to the running loop.
        """
        if not self._guard.is_bound:
            self._guard.enter()
        return await self._read(patience)

    async def probe(self, *, asks: bool) -> Health:
        """The health for a probe, which binds the outbox to no event loop.

        ``asks``: ask the database too. An outbox that is not in use is not asked.
        """
        return await self._read(TIMEOUT if asks and self._guard.is_bound else None)

    async def _read(self, patience: float | None) -> Health:
        """``patience``: the seconds for a question to the database, or ``None`` to ask nothing."""
        self._guard.refuse_in_child()  # the memory of a forked child is that of its parent
        home = self._guard.loop
        if home is None or home.is_closed() or home is asyncio.get_running_loop():
            return await self._read_here(patience)
        if not home.is_running():
            return self._judge(home)
        return await self._read_there(home, patience)

    async def _read_here(self, patience: float | None) -> Health:
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if patience is not None:
            await self._questions.answers(patience)
        return self._judge(asyncio.get_running_loop())

    async def _read_there(self, home: asyncio.AbstractEventLoop, patience: float | None) -> Health:
        began = machine.monotonic()
        if (silence := silence_of(home)) >= LONG_STANDSTILL:
            return self._silent(home, silence)
        told = asyncio.run_coroutine_threadsafe(self._read_here(patience), home)
        answer = asyncio.wrap_future(told)
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK))[0]:
                silence = max(silence_of(home), machine.monotonic() - began)
                if silence >= LONG_STANDSTILL:
                    return self._silent(home, silence)
            return await answer
        finally:
            told.cancel()

    def _judge(self, loop: asyncio.AbstractEventLoop) -> Health:
        """The health by the memory of this process, and by the last answers of the database."""
        memory = remembered(self._lifecycle, self._shards, loop)
        health = self._last = judge(memory, self._questions.last, Moment(loop.time(), machine.monotonic()))
        return health

    def _silent(self, home: asyncio.AbstractEventLoop, seconds: float) -> Health:
        """The health while the event loop of the outbox does not answer: the rest is as it was."""
        known = self._last or judge(
            remembered(self._lifecycle, self._shards, home), Answers(), Moment(home.time(), machine.monotonic())
        )
        text = (
            f"the event loop has not answered for {seconds:.0f} s: a handler blocks it; give a call that blocks to "
            "await asyncio.to_thread(...)"
        )
        return replace(known, status="down", live=False, ready=False, reasons=(text, *known.reasons))
