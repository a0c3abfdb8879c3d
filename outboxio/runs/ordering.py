"""Admission: may a due row start now?

Four rules make a due row wait:

* In an ordered handler only the head of each ordering key starts: the row of the lowest sequence that is not finished,
  or that parks the key.
* In an ordered handler a snapshot of a bootstrap starts after the events of its key that were committed before it.
* Where the priority of an event type is strict, a row starts after every handler of lower number has ended a first
  attempt at the event.
* A batch with a schedule waits for the scheduled moment.

The database is the truth. A row starts only after the database was asked for the head of the key, even if the key
queues in memory know a head. After the number of partitions was changed, the head may be a row of another process.
A row that has to wait becomes BLOCKED in the database, which keeps the row out of the due index, so that the row costs
no further read. In memory are the next rows of each key that moves, up to 50, so that
a key without failures is worked off without a BLOCKED row. ``runs/key_queues.py`` finds BLOCKED rows that no
process would unblock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from uuid import UUID

from outboxio.handlers.handler import wanted_by
from outboxio.model.event import BOOTSTRAP_ACTION, RECEIVED_ACTION
from outboxio.model.notification import State
from outboxio.runs.cursor import HandlerCursor, Partitions
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.key_queues import (
    MOST_WAITING,
    KeyQueue,
    KeyQueues,
    KeyRows,
    StrandedKeys,
    ids_of,
    no_heads,
    sequence_of,
)
from outboxio.runs.run import Run

_MOST_OLDER = 1000  # events that wait for fan-out, of a type, that are read for the snapshots of a bootstrap


class AdmissionGate:
    """Decides which of the due rows may start, and blocks the rows that have to wait."""

    def __init__(
        self,
        keys: KeyQueues,
        rows: KeyRows,
        partitions: Partitions,
        *,
        start: Callable[[Sequence[Run]], int],
        release: Callable[[Run], None],
        skip: Callable[[Run], None],
    ) -> None:
        """``start`` makes rows ready, ``release`` gives a row back, ``skip`` ends a row without a run."""
        self.stranded = StrandedKeys(rows)
        self._keys = keys
        self._rows = rows
        self._partitions = partitions
        self._start = start
        self._release = release
        self._skip = skip

    @property
    def unblocked(self) -> int:
        """How many rows were unblocked. Sweeps find the rows."""
        return self._rows.unblocked

    # --- which rows may start ------------------------------------------------------------------

    async def admit(self, queue: HandlerQueue, runs: Sequence[Run]) -> list[Run]:
        """The rows that may start, of rows that were found due. The rest are blocked or kept, and released."""
        undecided = list(runs)
        try:
            if queue.handler.options.relay:
                undecided = self._keep_inside(undecided)
            if queue.spec.next_moment is not None:
                undecided = await self._wait_for_moment(queue.spec.next_moment, undecided)
            if queue.handler.options.ordered:
                undecided = await self._queue_up(queue, undecided)
            undecided = await self._behind_others(queue, undecided)
        except BaseException:
            self._keys.remove(queue, undecided)
            for run in undecided:
                self._release(run)
            raise
        return undecided

    def _keep_inside(self, runs: list[Run]) -> list[Run]:
        """Skip events that the inbox has received: a relay sends no event out a second time."""
        ours: list[Run] = []
        for run in runs:
            notification = run.notification
            if notification.context.action_name == RECEIVED_ACTION and notification.state != State.DYING:
                self._skip(run)
            else:
                ours.append(run)
        return ours

    async def _wait_for_moment(self, next_moment: Callable[[datetime], datetime], runs: list[Run]) -> list[Run]:
        """Postpone rows without an attempt to the first moment after the oldest such row was made."""
        fresh = [run for run in runs if run.notification.state == State.PENDING and not run.notification.attempts]
        if not fresh:
            return runs
        now = self._rows.clock()
        if next_moment(min(_created(run) for run in fresh)) <= now:
            return runs
        moments: dict[datetime, list[Run]] = {}
        for run in fresh:
            moments.setdefault(next_moment(_created(run)), []).append(run)
        for moment, some in moments.items():
            await self._rows.repository.postpone(ids_of(some), moment, now)
        self._give_back(fresh)
        return [run for run in runs if run not in set(fresh)]

    async def _ahead_of_fanout(self, queue: HandlerQueue, snapshots: Sequence[Run]) -> set[Run]:
        """The snapshots of a bootstrap that have to wait, because an older event of their key waits for fan-out.

        A bootstrap writes its notifications itself, so a snapshot may be due before the notifications of older events
        exist. It is due again after a short while.
        """
        before, oldest, read_to = max(map(sequence_of, snapshots)), dict[str | None, int](), float("inf")
        for wanted in wanted_by(queue.handler):
            found = await self._rows.repository.find_undelivered(
                self._rows.namespace,
                wanted.topic or wanted.event_type,
                before,
                _MOST_OLDER,
                is_topic=bool(wanted.topic),
            )
            for sequence, key in found:
                oldest[key] = min(sequence, oldest.get(key, sequence))
            if len(found) == _MOST_OLDER:
                read_to = min(read_to, found[-1][0])  # the keys of later events are unknown
        late = {run for run in snapshots if min(oldest.get(run.key, read_to), read_to) < sequence_of(run)}
        if late:
            self.stranded.keep(queue, (run.key for run in late))
        return late

    async def _queue_up(self, queue: HandlerQueue, runs: list[Run]) -> list[Run]:
        """The heads of the keys. Up to 50 further rows of each key wait in memory, and the rest are blocked."""
        free: list[Run] = []
        by_key: dict[str, list[Run]] = {}
        snapshots: list[Run] = []
        for run in runs:
            context = run.notification.context
            run.key = context.ordering_key
            if run.key is None or run.notification.state == State.DYING:
                free.append(run)  # a hook keeps no order
            else:
                by_key.setdefault(run.key, []).append(run)
                if context.action_name == BOOTSTRAP_ACTION:
                    snapshots.append(run)
        late = await self._ahead_of_fanout(queue, snapshots) if snapshots else ()
        if late:
            by_key = {key: rest for key, some in by_key.items() if (rest := [run for run in some if run not in late])}
        by_place = self._keys.by_place
        heads = await self._rows.heads(queue, [key for key in by_key if (id(queue), key) not in by_place])
        blocked: list[Run] = []
        stranded: list[str] = []
        # The rows that wait in memory, over all keys, are at most as many as the rows that may be ready.
        room = queue.ahead.window - sum(len(keys.waiting) for keys in self._keys.of(queue))
        for key, some in by_key.items():
            some.sort(key=sequence_of)
            key_queue = by_place.get((id(queue), key))
            if key_queue is None:
                head = heads.get(key)
                first = None if head is None else next((r for r in some if r.notification.id == head.id), None)
                if first is None:
                    if head is None or head.state == State.BLOCKED:
                        # The rows were settled meanwhile, or are found again behind the rows that are unblocked now.
                        self._give_back(some)
                        stranded += [key] * (head is not None)
                    else:
                        blocked += some
                        self.stranded.want_sweep()  # another process may end the head before the rows are blocked
                    continue
                key_queue = by_place[id(queue), key] = KeyQueue(first)
                some.remove(first)
                free.append(first)
            before = len(key_queue.waiting)
            blocked += key_queue.queue_up(some, max(0, min(MOST_WAITING, before + room)))
            room -= len(key_queue.waiting) - before
        stranded += await self._block(queue, blocked)
        await self._rows.unblock(queue, stranded)
        if late:
            await self._keep_out([*late])
        await self._find_followers(queue, free)
        return free

    async def _find_followers(self, queue: HandlerQueue, heads: Sequence[Run]) -> None:
        """Ask the database which rows follow the heads without a gap: a call of a batch handler may have these rows."""
        if not (queue.spec.follows and heads):
            return
        limit = min(queue.spec.per_call // len(heads), MOST_WAITING)
        by_key: dict[str, KeyQueue] = {}
        for run in heads:
            keys = None if run.key is None else self._keys.by_place.get((id(queue), run.key))
            if run.key is not None and keys is not None and keys.waiting and keys.head is run:
                by_key[run.key] = keys
        if limit < 2 or not by_key:
            return
        lines = await self._rows.lines(queue, list(by_key), limit)
        for key, keys in by_key.items():
            keys.heed(lines.get(key, ()))

    async def _behind_others(self, queue: HandlerQueue, runs: list[Run]) -> list[Run]:
        """Block the rows that wait for handlers of lower number to have a first attempt; the rows that may start."""
        strict = [
            run
            for run in runs
            if run.notification.event_type in queue.spec.strict_types and run.notification.state == State.PENDING
        ]
        preceded = await self._rows.repository.find_preceded(ids_of(strict)) if strict else set[UUID]()
        if not preceded:
            return runs
        behind = [run for run in strict if run.notification.id in preceded]
        for run in behind:
            if run.key is not None and (key_queue := self._keys.by_place.pop((id(queue), run.key), None)) is not None:
                behind = [*behind, *key_queue.waiting]  # no row of a key overtakes the head of the key
        self.stranded.want_sweep()  # another process may end the attempt before the rows are blocked
        events = {run.notification.event_id for run in behind}
        await self._keep_out(behind)
        if self._partitions.are_several(queue.spec.names):  # the holder of partition 0, which sweeps, may be asleep
            await self._rows.release(events)
        return [run for run in runs if run.notification.id not in preceded]

    # --- moving up -----------------------------------------------------------------------------

    async def advance(self, cursors: Iterable[HandlerCursor], now: float) -> int:
        """Start the rows behind rows that have ended, and release rows that wait elsewhere; how many have started."""
        ours = [cursor for cursor in cursors if cursor.queue.spec.needs_admission]
        held = {id(cursor.queue) for cursor in ours}
        keys = self._keys
        if keys.attempted:
            attempted, keys.attempted = keys.attempted, set()
            try:
                await self._rows.release(attempted)
            except BaseException:
                keys.attempted |= attempted
                raise
        started = 0
        for queue in {id(queue): queue for queue in keys.moved.values()}.values():
            # The rows of one handler start before the next handler's heads are read: a failure there undoes no start.
            started += self._start(await self._advance(queue, is_held=id(queue) in held))
        if self.stranded.kept:
            await self.stranded.release(now)
        if self.stranded.is_due(now):
            await self.stranded.sweep(ours)
        return started

    async def _advance(self, queue: HandlerQueue, *, is_held: bool) -> list[Run]:
        moved, by_place = self._keys.take_moved(queue), self._keys.by_place
        if not is_held:
            for place in moved:
                if (key_queue := by_place.pop(place, None)) is not None:
                    self._give_back(key_queue.waiting)
            return []
        keys = [key for _, key in moved]
        try:
            heads = await self._rows.heads(queue, keys)
        except BaseException:
            self._keys.moved.update(moved)
            raise
        up: list[Run] = []
        blocked: list[Run] = []
        stranded: list[str] = []
        for key in keys:
            key_queue, head = by_place.get((id(queue), key)), heads.get(key)
            waiting = [] if key_queue is None else key_queue.waiting
            index = next((i for i, r in enumerate(waiting) if head is not None and r.notification.id == head.id), None)
            if key_queue is not None and index is not None:
                self._give_back(waiting[:index])
                key_queue.head, key_queue.waiting = waiting[index], waiting[index + 1 :]
                key_queue.followers = 0
                up.append(key_queue.head)
                continue
            by_place.pop((id(queue), key), None)
            if head is None or head.state == State.BLOCKED:
                self._give_back(waiting)
                stranded += [key] * (head is not None)
            else:
                blocked += waiting
        try:
            stranded += await self._block(queue, blocked)
            await self._rows.unblock(queue, stranded)
            await self._find_followers(queue, up)
            return await self._behind_others(queue, up)
        except BaseException:
            for run in up:
                self._release(run)  # the release marks the keys as moved again, and the rows are found anew
            raise

    async def _block(self, queue: HandlerQueue, runs: Sequence[Run]) -> list[str]:
        """Block rows behind the heads of keys; the keys that are stranded, because the head has ended meanwhile.

        The process that ended the head saw no BLOCKED row, so it unblocks none. Where all rows of a key are in a single
        partition, this process alone ends heads, so the heads need not be asked for once more.
        """
        if not runs or not self._partitions.are_several(queue.spec.names):
            await self._keep_out(runs)
            return []
        keys = sorted({run.key for run in runs if run.key is not None})
        await self._keep_out(runs)
        try:
            heads = await self._rows.heads(queue, keys)
        except BaseException:
            self._keys.moved |= {(id(queue), key): queue for key in keys}  # the next round asks
            raise
        return [key for key, head in heads.items() if head.state == State.BLOCKED]

    async def _keep_out(self, runs: Sequence[Run]) -> None:
        """Block rows, and give the rows back."""
        if not runs:
            return
        try:
            await self._rows.block(runs)
        finally:
            self._give_back(runs)

    def _give_back(self, runs: Iterable[Run]) -> None:
        """Release rows that were no heads of keys."""
        for run in no_heads(runs):
            self._release(run)


def _created(run: Run) -> datetime:
    return run.notification.context.created_date
