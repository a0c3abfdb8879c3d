"""Admission: decides whether a due row may start now.

Four rules make a due row wait:

* In an ordered handler only the head of each ordering key starts: the unfinished row of the lowest sequence, or the row
  that parks the key.
* In an ordered handler a bootstrap snapshot starts after the events of its key that were committed before it.
* If the priority of an event type is strict, a row starts after every handler with a lower number has finished its
  first attempt at the event.
* A batch with a schedule waits for its scheduled time.

The database is authoritative. A row starts only after the head of its key was read from the database, even if a head is
known in memory: after a change of the partition count, the head may be a row of another process. A row that has to wait
becomes BLOCKED in the database, which removes it from the due index, so that it is not read again. Up to 50 of the next
rows of each key stay in memory, so that a key without failures is processed without BLOCKED rows. ``key_queues.py``
finds BLOCKED rows that no process would unblock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from uuid import UUID

from outboxio.handlers.handler import subscriptions_of
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

_MOST_OLDER = 1000  # events per type that wait for fan-out and are compared with bootstrap snapshots


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
        """``start`` makes rows ready, ``release`` releases a row, ``skip`` ends a row without a run."""
        self.stranded = StrandedKeys(rows)
        self._keys = keys
        self._rows = rows
        self._partitions = partitions
        self._start = start
        self._release = release
        self._skip = skip

    @property
    def unblocked(self) -> int:
        """How many rows were unblocked. Sweeps find them."""
        return self._rows.unblocked

    # --- which rows may start ------------------------------------------------------------------

    async def admit(self, queue: HandlerQueue, runs: Sequence[Run]) -> list[Run]:
        """Return the due rows that may start. The others are kept in memory, or are blocked and released."""
        undecided = list(runs)
        try:
            if queue.handler.options.relay:
                undecided = self._skip_received(undecided)
            if queue.spec.next_time is not None:
                undecided = await self._wait_for_schedule(queue.spec.next_time, undecided)
            if queue.handler.options.ordered:
                undecided = await self._queue_up(queue, undecided)
            undecided = await self._behind_others(queue, undecided)
        except BaseException:
            self._keys.remove(queue, undecided)
            for run in undecided:
                self._release(run)
            raise
        return undecided

    def _skip_received(self, runs: list[Run]) -> list[Run]:
        """Skip events that the inbox has received, so that a relay does not send them out again."""
        ours: list[Run] = []
        for run in runs:
            notification = run.notification
            if notification.context.action_name == RECEIVED_ACTION and notification.state != State.DYING:
                self._skip(run)
            else:
                ours.append(run)
        return ours

    async def _wait_for_schedule(self, next_time: Callable[[datetime], datetime], runs: list[Run]) -> list[Run]:
        """Postpone rows without an attempt to the first scheduled time after they were created."""
        fresh = [run for run in runs if run.notification.state == State.PENDING and not run.notification.attempts]
        if not fresh:
            return runs
        now = self._rows.clock()
        if next_time(min(_created(run) for run in fresh)) <= now:
            return runs
        times: dict[datetime, list[Run]] = {}
        for run in fresh:
            times.setdefault(next_time(_created(run)), []).append(run)
        for at, some in times.items():
            await self._rows.repository.postpone(ids_of(some), at, now)
        self._release_all(fresh)
        return [run for run in runs if run not in set(fresh)]

    async def _ahead_of_fanout(self, queue: HandlerQueue, snapshots: Sequence[Run]) -> set[Run]:
        """Return the bootstrap snapshots that have to wait, because an older event of their key waits for fan-out.

        A bootstrap writes its own notifications, so a snapshot may be due before the notifications of older events
        exist. It becomes due again after a short while.
        """
        before, oldest, read_to = max(map(sequence_of, snapshots)), dict[str | None, int](), float("inf")
        for subscription in subscriptions_of(queue.handler):
            found = await self._rows.repository.find_undelivered(
                self._rows.namespace,
                subscription.topic or subscription.event_type,
                before,
                _MOST_OLDER,
                is_topic=bool(subscription.topic),
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
        """Return the heads of the keys. Up to 50 more rows of each key wait in memory, and the others are blocked."""
        free: list[Run] = []
        by_key: dict[str, list[Run]] = {}
        snapshots: list[Run] = []
        for run in runs:
            context = run.notification.context
            run.key = context.ordering_key
            if run.key is None or run.notification.state == State.DYING:
                free.append(run)  # hooks are not ordered
            else:
                by_key.setdefault(run.key, []).append(run)
                if context.action_name == BOOTSTRAP_ACTION:
                    snapshots.append(run)
        late = await self._ahead_of_fanout(queue, snapshots) if snapshots else ()
        if late:
            by_key = {key: left for key, some in by_key.items() if (left := [run for run in some if run not in late])}
        queues = self._keys.queues
        heads = await self._rows.heads(queue, [key for key in by_key if (id(queue), key) not in queues])
        blocked: list[Run] = []
        stranded: list[str] = []
        # At most as many rows wait in memory, over all keys, as may be ready.
        free_rows = queue.ahead.window - sum(len(keys.waiting) for keys in self._keys.of(queue))
        for key, some in by_key.items():
            some.sort(key=sequence_of)
            key_queue = queues.get((id(queue), key))
            if key_queue is None:
                head = heads.get(key)
                first = None if head is None else next((r for r in some if r.notification.id == head.id), None)
                if first is None:
                    if head is None or head.state == State.BLOCKED:
                        # The rows were settled in the meantime, or are found again after those that are unblocked now.
                        self._release_all(some)
                        stranded += [key] * (head is not None)
                    else:
                        blocked += some
                        self.stranded.request_sweep()  # another process may end the head before these rows are blocked
                    continue
                key_queue = queues[id(queue), key] = KeyQueue(first)
                some.remove(first)
                free.append(first)
            before = len(key_queue.waiting)
            blocked += key_queue.queue_up(some, max(0, min(MOST_WAITING, before + free_rows)))
            free_rows -= len(key_queue.waiting) - before
        stranded += await self._block(queue, blocked)
        await self._rows.unblock(queue, stranded)
        if late:
            await self._keep_out([*late])
        await self._find_followers(queue, free)
        return free

    async def _find_followers(self, queue: HandlerQueue, heads: Sequence[Run]) -> None:
        """Read which rows follow the heads without a gap, because a batch may include them."""
        if not (queue.spec.follows and heads):
            return
        limit = min(queue.spec.per_call // len(heads), MOST_WAITING)
        by_key: dict[str, KeyQueue] = {}
        for run in heads:
            keys = None if run.key is None else self._keys.queues.get((id(queue), run.key))
            if run.key is not None and keys is not None and keys.waiting and keys.head is run:
                by_key[run.key] = keys
        if limit < 2 or not by_key:
            return
        orders = await self._rows.read_order(queue, list(by_key), limit)
        for key, keys in by_key.items():
            keys.apply_order(orders.get(key, ()))

    async def _behind_others(self, queue: HandlerQueue, runs: list[Run]) -> list[Run]:
        """Block rows that wait for the first attempt of handlers with lower numbers; return the others."""
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
            if run.key is not None and (key_queue := self._keys.queues.pop((id(queue), run.key), None)) is not None:
                behind = [*behind, *key_queue.waiting]  # no row overtakes the head of its key
        self.stranded.request_sweep()  # another process may end the attempt before these rows are blocked
        events = {run.notification.event_id for run in behind}
        await self._keep_out(behind)
        if self._partitions.are_several(queue.spec.names):  # the holder of partition 0, which sweeps, may be suspended
            await self._rows.release(events)
        return [run for run in runs if run.notification.id not in preceded]

    # --- moving up -----------------------------------------------------------------------------

    async def advance(self, cursors: Iterable[HandlerCursor], now: float) -> int:
        """Start rows that waited for ended rows, and unblock rows that wait elsewhere; return how many started."""
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
            # Start the rows of a handler before reading the heads of the next, so that an error there undoes no start.
            started += self._start(await self._advance(queue, is_held=id(queue) in held))
        if self.stranded.kept:
            await self.stranded.release(now)
        if self.stranded.is_due(now):
            await self.stranded.sweep(ours)
        return started

    async def _advance(self, queue: HandlerQueue, *, is_held: bool) -> list[Run]:
        moved, queues = self._keys.take_moved(queue), self._keys.queues
        if not is_held:
            for queue_key in moved:
                if (key_queue := queues.pop(queue_key, None)) is not None:
                    self._release_all(key_queue.waiting)
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
            key_queue, head = queues.get((id(queue), key)), heads.get(key)
            waiting = [] if key_queue is None else key_queue.waiting
            index = next((i for i, r in enumerate(waiting) if head is not None and r.notification.id == head.id), None)
            if key_queue is not None and index is not None:
                self._release_all(waiting[:index])
                key_queue.head, key_queue.waiting = waiting[index], waiting[index + 1 :]
                key_queue.followers = 0
                up.append(key_queue.head)
                continue
            queues.pop((id(queue), key), None)
            if head is None or head.state == State.BLOCKED:
                self._release_all(waiting)
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
                self._release(run)  # marks the key as moved again, and the row is found again
            raise

    async def _block(self, queue: HandlerQueue, runs: Sequence[Run]) -> list[str]:
        """Block rows behind the heads of keys; return the keys that are stranded because their head has finished.

        The process that ended the head saw no BLOCKED row, so it unblocks none. If all rows of a key are in one
        partition, only this process ends heads, so they need not be read again.
        """
        if not runs or not self._partitions.are_several(queue.spec.names):
            await self._keep_out(runs)
            return []
        keys = sorted({run.key for run in runs if run.key is not None})
        await self._keep_out(runs)
        try:
            heads = await self._rows.heads(queue, keys)
        except BaseException:
            self._keys.moved |= {(id(queue), key): queue for key in keys}  # read in the next round
            raise
        return [key for key, head in heads.items() if head.state == State.BLOCKED]

    async def _keep_out(self, runs: Sequence[Run]) -> None:
        """Block rows, and release them."""
        if not runs:
            return
        try:
            await self._rows.block(runs)
        finally:
            self._release_all(runs)

    def _release_all(self, runs: Iterable[Run]) -> None:
        """Release rows that are not heads of keys."""
        for run in no_heads(runs):
            self._release(run)


def _created(run: Run) -> datetime:
    return run.notification.context.created_date
