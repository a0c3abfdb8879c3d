"""Lines: rows that are due, and have to wait for another all the same.

Three rules make a row wait. In an ordered handler, of the rows of one ordering key only the head starts: the one of the
lowest sequence that is not finished, or that parks the key. Where an event's priority is strict, a row starts after
every handler of lower number has ended its first attempt at the event. And a batch with a schedule waits for its
moment.

The database is the truth. A row starts only after its head was asked for there, whatever this memory says; a row that
has to wait is BLOCKED there, which keeps it out of the due index, so that it costs the others nothing. In memory are
the next few rows of each key that moves, so that a key without failures is worked off without a row ever being
blocked. What another process did, or a crash left undone, is put right by looking along the lines from time to time:
a line whose head is BLOCKED has nobody who would unblock it.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.clock import Clock
from outboxio.event import RECEIVED_ACTION
from outboxio.notification import State
from outboxio.outcome import Outcome
from outboxio.queues import HandlerQueue, Run, Source
from outboxio.storage.protocols import Head, LineRepository

MOST_WAITING = 50  # rows of one key that wait in memory, or are unblocked together
LOOK_ALONG = 1000  # keys, or rows, that are looked at in one piece
SHORTEST_PAUSE = 1.0  # seconds between two looks along the lines
SHARE_OF_TIME = 50  # and at least so many times as long as a look took


class Line:
    """The rows of one key that are in memory: one that is ready or runs, and the next ones in order."""

    __slots__ = ("head", "waiting")

    def __init__(self, head: Run) -> None:
        self.head = head
        self.waiting: list[Run] = []

    def queue_up(self, runs: Iterable[Run], room: int) -> list[Run]:
        """Take rows in; the last ones, as many as there is no room for, come back."""
        for run in runs:
            insort(self.waiting, run, key=_sequence)
        excess = self.waiting[room:]
        del self.waiting[room:]
        return excess


class Lines:
    """Decides which of the due rows may start, and blocks the others."""

    def __init__(
        self,
        namespace: str,
        repository: LineRepository,
        clock: Clock,
        *,
        start: Callable[[Run], object],
        release: Callable[[Run], None],
        skip: Callable[[Outcome], None],
        unblocked: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._repository = repository
        self._clock = clock
        self._start = start
        self._release = release
        self._skip = skip
        self._unblocked = unblocked
        self._lines: dict[tuple[int, str], Line] = {}
        self._moved: dict[tuple[int, str], HandlerQueue] = {}
        self._attempted: set[UUID] = set()
        self._look_at = float("-inf")
        self._looked_up_to: dict[str, Any] = {}
        self.unblocked = 0
        """How many rows were unblocked: they are found by a sweep."""

    @property
    def has_moved(self) -> bool:
        """Whether something ended for which another row may wait."""
        return bool(self._moved or self._attempted)

    def look_along_soon(self) -> None:
        """A lock was taken: its former holder may have left something undone."""
        self._look_at = float("-inf")

    # --- what ends -----------------------------------------------------------------------------

    def left(self, run: Run) -> None:
        """A row is settled, or was given back: whoever waits for it may go on."""
        queue = run.queue
        if run.key is not None:
            self._moved[id(queue), run.key] = queue
        if run.notification.state == State.PENDING and run.notification.event_type in queue.strict_types:
            self._attempted.add(run.notification.event_id)

    def drop(self, queue: HandlerQueue) -> None:
        """Give back what waits in memory, as when its lock was lost."""
        for line in self._lines_of(queue):
            waiting, line.waiting = line.waiting, []
            self._give_back(waiting)

    # --- who may start -------------------------------------------------------------------------

    async def admit(self, queue: HandlerQueue, runs: Sequence[Run]) -> list[Run]:
        """Of rows that were found due, those that may start. The others are put away, and released."""
        undecided = list(runs)
        try:
            if queue.handler.options.relay:
                undecided = self._keep_inside(undecided)
            if queue.next_moment is not None:
                undecided = await self._wait_for_moment(queue, queue.next_moment, undecided)
            if queue.handler.options.ordered:
                undecided = await self._line_up(queue, undecided)
            undecided = await self._behind_others(queue, undecided)
        except BaseException:
            given_up = set(undecided)
            for line in self._lines_of(queue):
                line.waiting = [run for run in line.waiting if run not in given_up]
            for run in undecided:
                self._release(run)
            raise
        return undecided

    def _keep_inside(self, runs: list[Run]) -> list[Run]:
        """What came in from outside is not sent out again."""
        ours: list[Run] = []
        for run in runs:
            notification = run.notification
            if notification.context.action_name == RECEIVED_ACTION and notification.state != State.DYING:
                run.key = notification.context.ordering_key
                self._skip(Outcome(notification.id, run.lease, State.SKIPPED, notification.attempts))
            else:
                ours.append(run)
        return ours

    async def _wait_for_moment(
        self, queue: HandlerQueue, next_moment: Callable[[datetime], datetime], runs: list[Run]
    ) -> list[Run]:
        """A row that was never tried waits for the first moment after the oldest such row was made."""
        fresh = [run for run in runs if run.notification.state == State.PENDING and not run.notification.attempts]
        if not fresh:
            return runs
        now = self._clock()
        if next_moment(min(_created(run) for run in fresh)) <= now:
            return runs
        moments: dict[datetime, list[Run]] = {}
        for run in fresh:
            moments.setdefault(next_moment(_created(run)), []).append(run)
        for moment, some in moments.items():
            await self._repository.postpone(_ids(some), moment, now)
        self._give_back(fresh)
        return [run for run in runs if run not in set(fresh)]

    async def _line_up(self, queue: HandlerQueue, runs: list[Run]) -> list[Run]:
        free: list[Run] = []
        by_key: dict[str, list[Run]] = {}
        for run in runs:
            run.key = run.notification.context.ordering_key
            if run.key is None or run.notification.state == State.DYING:
                free.append(run)  # a hook waits for nobody
            else:
                by_key.setdefault(run.key, []).append(run)
        unknown = [key for key in by_key if (id(queue), key) not in self._lines]
        heads = await self._heads(queue, unknown)
        blocked: list[Run] = []
        stranded: list[str] = []
        # As many rows wait in memory as are read ahead, over all keys.
        room = queue.window - sum(len(line.waiting) for line in self._lines_of(queue))
        for key, some in by_key.items():
            some.sort(key=_sequence)
            line = self._lines.get((id(queue), key))
            if line is None:
                head = heads.get(key)
                first = None if head is None else next((r for r in some if r.notification.id == head.id), None)
                if first is None:
                    if head is None or head.state == State.BLOCKED:
                        # They were settled meanwhile, or are found again behind those that are unblocked.
                        self._give_back(some)
                        stranded += [key] * (head is not None)
                    else:
                        blocked += some
                    continue
                line = self._lines[id(queue), key] = Line(first)
                some.remove(first)
                free.append(first)
            before = len(line.waiting)
            blocked += line.queue_up(some, max(0, min(MOST_WAITING, before + room)))
            room -= len(line.waiting) - before
        await self._block(blocked)
        await self._unblock(queue, stranded)
        return free

    async def _behind_others(self, queue: HandlerQueue, runs: list[Run]) -> list[Run]:
        """What has to wait for handlers of a lower number is blocked until these have had their first attempt."""
        strict = [
            run
            for run in runs
            if run.notification.event_type in queue.strict_types and run.notification.state == State.PENDING
        ]
        preceded = await self._repository.find_preceded(_ids(strict)) if strict else set[UUID]()
        if not preceded:
            return runs
        behind = [run for run in strict if run.notification.id in preceded]
        for run in behind:
            if run.key is not None and (line := self._lines.pop((id(queue), run.key), None)) is not None:
                behind = [*behind, *line.waiting]  # a key does not go past its head
        await self._block(behind)
        return [run for run in runs if run.notification.id not in preceded]

    # --- moving up -----------------------------------------------------------------------------

    async def advance(self, sources: Iterable[Source], now: float) -> int:
        """Start the heads for which the one before has ended, and release what waits elsewhere; how many started."""
        held = {id(source.queue): source.queue for source in sources if source.queue.is_choosy}
        if self._attempted:
            attempted, self._attempted = self._attempted, set()
            try:
                self._count(await self._repository.release(sorted(attempted), self._clock()))
            except BaseException:
                self._attempted |= attempted
                raise
        started = 0
        for queue in {id(queue): queue for queue in self._moved.values()}.values():
            # Each queue is done with before the next one is asked about: a failure there takes nothing back here.
            for run in await self._advance(queue, is_held=id(queue) in held):
                self._start(run)
                started += 1
        if now >= self._look_at:
            await self._look_along(list(held.values()))
        return started

    async def _advance(self, queue: HandlerQueue, *, is_held: bool) -> list[Run]:
        moved = {place: owner for place, owner in self._moved.items() if owner is queue}
        for place in moved:
            del self._moved[place]
        if not is_held:
            for place in moved:
                if (line := self._lines.pop(place, None)) is not None:
                    self._give_back(line.waiting)
            return []
        keys = [key for _, key in moved]
        try:
            heads = await self._heads(queue, keys)
        except BaseException:
            self._moved.update(moved)
            raise
        up: list[Run] = []
        blocked: list[Run] = []
        stranded: list[str] = []
        for key in keys:
            line, head = self._lines.get((id(queue), key)), heads.get(key)
            waiting = [] if line is None else line.waiting
            index = next((i for i, r in enumerate(waiting) if head is not None and r.notification.id == head.id), None)
            if line is not None and index is not None:
                self._give_back(waiting[:index])
                line.head, line.waiting = waiting[index], waiting[index + 1 :]
                up.append(line.head)
                continue
            self._lines.pop((id(queue), key), None)
            if head is None or head.state == State.BLOCKED:
                self._give_back(waiting)
                stranded += [key] * (head is not None)
            else:
                blocked += waiting
        try:
            await self._block(blocked)
            await self._unblock(queue, stranded)
            return await self._behind_others(queue, up)
        except BaseException:
            for run in up:
                self._release(run)  # they have moved again by that, and are found anew
            raise

    # --- looking along -------------------------------------------------------------------------

    async def _look_along(self, queues: Iterable[HandlerQueue]) -> None:
        """Unblock what nobody else will: after a crash, an operator's order, a wait for another process."""
        time = asyncio.get_running_loop().time
        began, is_through = time(), True
        for queue in queues:
            if queue.handler.options.ordered:
                for name in sorted(queue.handler.names):
                    is_through &= await self._look_along_keys(queue, name)
            if queue.strict_types:
                is_through &= await self._look_along_blocked(queue)
        pause = SHARE_OF_TIME * (time() - began)
        self._look_at = began + (max(pause, SHORTEST_PAUSE) if is_through else pause)

    async def _look_along_keys(self, queue: HandlerQueue, name: str) -> bool:
        """One piece of the keys of a name; whether it was the last."""
        after: str | None = self._looked_up_to.get(name)
        heads = await self._repository.heads_after(self._namespace, name, after, LOOK_ALONG, parks=queue.parks)
        self._looked_up_to[name] = next(reversed(heads)) if len(heads) >= LOOK_ALONG else None
        suspected = [key for key, head in heads.items() if head.state == State.BLOCKED]
        confirmed = await self._heads(queue, suspected)  # under every name
        await self._unblock(queue, [key for key, head in confirmed.items() if head.state == State.BLOCKED])
        return len(heads) < LOOK_ALONG

    async def _look_along_blocked(self, queue: HandlerQueue) -> bool:
        """The same for rows that wait for other handlers of their event."""
        names, place = sorted(queue.handler.names), f"#{queue.handler.name}"
        after: int = self._looked_up_to.get(place, -1)
        rows = await self._repository.find_blocked(self._namespace, names, after, LOOK_ALONG)
        self._looked_up_to[place] = rows[-1][0] if len(rows) >= LOOK_ALONG else -1
        if rows:
            self._count(await self._repository.release(sorted({event_id for _, event_id in rows}), self._clock()))
        return len(rows) < LOOK_ALONG

    # --- the database --------------------------------------------------------------------------

    async def _heads(self, queue: HandlerQueue, keys: Sequence[str]) -> dict[str, Head]:
        if not keys:
            return {}
        names = sorted(queue.handler.names)
        return await self._repository.find_heads(self._namespace, names, keys, parks=queue.parks)

    async def _block(self, runs: Sequence[Run]) -> None:
        if not runs:
            return
        try:
            await self._repository.block(_ids(runs), self._clock())
        finally:
            self._give_back(runs)

    async def _unblock(self, queue: HandlerQueue, keys: Sequence[str]) -> None:
        if keys:
            names = sorted(queue.handler.names)
            self._count(
                await self._repository.unblock(self._namespace, names, sorted(keys), MOST_WAITING, self._clock())
            )

    def _count(self, unblocked: int) -> None:
        if unblocked:
            self.unblocked += unblocked
            self._unblocked()

    def _give_back(self, runs: Iterable[Run]) -> None:
        """These were nobody's head, so nobody waits for them."""
        for run in runs:
            run.key = None
            self._release(run)

    def _lines_of(self, queue: HandlerQueue) -> list[Line]:
        return [line for (owner, _), line in self._lines.items() if owner == id(queue)]


def _sequence(run: Run) -> int:
    return run.notification.sequence


def _created(run: Run) -> datetime:
    return run.notification.context.created_date


def _ids(runs: Iterable[Run]) -> list[UUID]:
    return sorted(run.notification.id for run in runs)
