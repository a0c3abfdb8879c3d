"""Work per slot of this process: a share of each read, rehashing of rows, and waking of deferred rows.

Slot shares: how many rows of each slot a find round reads, so that a round reads about a batch in total.

The stored handler names share the batch. The slots of a name divide its share, which is at most the window of the
handler. So the partition count of a handler affects neither its number of ready rows nor the share of other handlers.

Rehashing: after the partition count of a name has changed, due rows move to their new partitions.

New rows use the new count at once. A backlog from before the change would stay in one process, so the holder of each
slot moves the rows that belong to another partition, 1,000 rows per statement, until the end of the slot is reached. A
slot is checked after its lock was acquired or the count changed, once a read has left due rows: without a backlog there
is nothing to distribute. Only the holder of the slot moves rows, between two find rounds, and never a row in flight, so
no row is found and moved at the same time. The statement takes effect only under the current term of the lock, so a
suspended process moves no row that the new holder runs. Ordering does not depend on rehashing, because the head of an
ordering key is read across all partitions.

Waking: the holder of a slot makes deferred rows due that it can read, or that are past their retention.

Rows are deferred if only newer code can read them (``runs/deferral.py``). Newer code comes with a new process, so they
are looked for when a slot is acquired. Rows past their retention are looked for periodically; once read, they expire.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from outboxio.dispatch.core import Core
from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_POSITION, DeferredQuery, Position
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.deferral import deferred_until, readable_version
from outboxio.support.log import log_of
from outboxio.support.scan_position import FairShare

logger = log_of(__name__)

CHUNK = 1000  # rows that a statement moves or makes due
LATE_COMMIT = timedelta(minutes=1)  # after a count was changed, transactions may still create rows by the old count
RECHECK_DELAY = 600.0  # seconds until all slots are searched again for deferred rows

Counts = dict[tuple[str, int], int]
"""The number of rows found, by slot."""


class SlotShares:
    """Divides a batch among slots by the rows that each had in the last round (``support/scan_position.py``)."""

    def __init__(self, batch_size: int) -> None:
        self._names: FairShare[str] = FairShare(batch_size)
        self._slots: dict[str, FairShare[int]] = {}
        """The shares of partitions, for names with several partitions in this process."""

    def limits(self, cursors: Sequence[HandlerCursor]) -> list[tuple[HandlerCursor, int, int]]:
        """Return for each slot the maximum number of rows to read, and how many slots of its name are read."""
        by_name: dict[str, list[HandlerCursor]] = {}
        for cursor in cursors:
            by_name.setdefault(cursor.slot.handler_name, []).append(cursor)
        found: list[tuple[HandlerCursor, int, int]] = []
        for name, limit in self._names.limits(by_name).items():
            ours = by_name[name]
            most = min(limit, ours[0].queue.ahead.window)
            if len(ours) == 1:
                found.append((ours[0], most, 1))
                continue
            shares = self._slots.setdefault(name, FairShare(most))
            shares.batch_size = most
            limits = shares.limits([cursor.slot.partition for cursor in ours])
            found += [(cursor, limits[cursor.slot.partition], len(ours)) for cursor in ours]
        return found

    def learn(self, slots: Sequence[Slot], counts: Mapping[tuple[str, int], int], full: Collection[Slot]) -> None:
        """Process a round: the slots that were read, the rows found in each, and the slots with more rows."""
        found: dict[str, int] = {}
        for slot in slots:
            found[slot.handler_name] = found.get(slot.handler_name, 0) + counts.get(slot, 0)
        self._names.learn(list(found), found, {slot.handler_name for slot in full})
        for name, shares in self._slots.items():
            ours = [slot for slot in slots if slot.handler_name == name]
            shares.learn(
                [slot.partition for slot in ours],
                {slot.partition: counts[slot] for slot in ours if slot in counts},
                {slot.partition for slot in full if slot.handler_name == name},
            )


class Rehashing:
    """The slots of this process whose rows may belong to another partition."""

    def __init__(self, core: Core) -> None:
        self._repository = core.setup.database.partitions
        self._namespace = core.setup.namespace
        self._clock = core.setup.clock
        self._partitions = core.partitions
        self._in_flight = core.in_flight
        self._cursors = core.in_flight.cursors
        self._stuck = core.stuck
        self._wakeups = core.wakeups
        self._unchecked: set[Slot] = set()
        """The slots that were not checked since they were acquired, or since the count changed."""
        self._owing: dict[Slot, Position] = {}
        """The slots that are not read to the end, with the positions reached."""
        self._requests = 0
        """How often a slot was requested."""

    @property
    def is_due(self) -> bool:
        """True if a slot may have rows that belong to another partition."""
        return bool(self._owing)

    def owes(self, handler_name: str) -> bool:
        """Return True if rows of a handler name may be moved. Such rows must not be handed over."""
        return bool(self._owing) and any(slot.handler_name == handler_name for slot in self._owing)

    def request(self, slot: Slot) -> None:
        """Check a slot, because it was acquired or its partition count changed.

        The previous holder of a slot may have moved only some of the rows.
        """
        count = self._partitions.find(slot.handler_name)
        if self._repository is not None and count is not None and (count.number > 1 or slot.partition):
            self._unchecked.add(slot)
            cursor = self._cursors.by_slot.get(slot)
            if cursor is not None and (cursor.has_backlog or cursor.is_paused):  # a paused slot is not read
                self.has_backlog(slot)

    def has_backlog(self, slot: Slot) -> None:
        """Read a slot with a backlog from the beginning, if it still has to be checked."""
        if slot in self._unchecked:
            self._unchecked.discard(slot)
            self._owing[slot] = FIRST_POSITION
            self._requests += 1

    def forget(self, slot: Slot) -> None:
        """Forget a slot that is halted or whose lock is lost."""
        self._unchecked.discard(slot)
        self._owing.pop(slot, None)

    async def rehash_once(self) -> int:
        """Move a chunk of the rows of a slot; return how many. Call this only between two find rounds."""
        assert self._repository is not None
        slot, after = next(iter(self._owing.items()))
        cursor = self._cursors.by_slot.get(slot)
        if cursor is None:  # the slot is halted, or its lock is lost
            self.forget(slot)
            return 0
        in_flight = [i for i, run in self._in_flight.rows.items() if slot.holds(run.notification)]
        now = self._clock()
        requests, staying = self._requests, [*in_flight, *self._stuck.ids]
        done = await self._repository.rehash(self._namespace, cursor.lease, after, CHUNK, staying, now)
        # Otherwise the lock was lost, or the slot must be processed from the start again: the partition count has
        # changed, or the lock was reacquired, and the statement moved nothing under the previous term.
        if slot in self._owing and requests == self._requests:
            del self._owing[slot]
            if done.position is not None and not self._is_complete(slot, done.position):
                self._owing[slot] = done.position  # behind all other slots
        if done.moved:
            logger.debug(
                "rehashed %d rows of %s into their new partitions", done.moved, slot,
                handler=slot.handler_name, partition=slot.partition,
            )  # fmt: skip
            for other in self._cursors:
                if other.slot.handler_name == slot.handler_name:
                    other.sweep_soon()
            self._wakeups.moved()
        return done.moved

    def _is_complete(self, slot: Slot, reached: Position) -> bool:
        """Return True if the rows behind a position were created by the new count."""
        count = self._partitions.find(slot.handler_name)
        if count is None or slot.partition >= count.number:
            return False
        return reached[0] > count.changed_date + LATE_COMMIT


class Waking:
    """The slots of this process that may have deferred rows that it can read."""

    def __init__(self, core: Core) -> None:
        self._setup = core.setup
        self._cursors = core.in_flight.cursors
        self._requested: dict[Slot, None] = {}
        self._next_look = float("inf")

    def request(self, slot: Slot) -> None:
        """Check an acquired slot, because the code of this process may be newer than that of the previous holder."""
        self._requested[slot] = None

    def forget(self, slot: Slot) -> None:
        """Forget a slot that is halted or whose lock is lost."""
        self._requested.pop(slot, None)

    def is_due(self, now: float) -> bool:
        """Return True if it is time to look for deferred rows. ``now``: event loop time."""
        return bool(self._requested) or now >= self._next_look

    async def wake_once(self, now: float) -> bool:
        """Make deferred rows due; return True if there may be more."""
        if now >= self._next_look:
            self._requested.update(dict.fromkeys(cursor.slot for cursor in self._cursors))
        self._next_look = now + RECHECK_DELAY
        slots, setup = list(self._requested), self._setup
        at, queries = setup.clock(), list[DeferredQuery]()
        for slot in slots:
            cursor = self._cursors.by_slot.get(slot)
            if cursor is not None:
                spec = cursor.queue.spec
                until = deferred_until(readable_version(setup.handlers, spec.handler))
                queries.append(DeferredQuery(*slot, until, at - min(spec.retention, _LONGEST)))
        if not queries:
            self._requested.clear()
            return False
        woken = await setup.database.deferred.wake(setup.namespace, queries, at, CHUNK)
        if woken:
            for slot in slots:
                self._cursors.sweep_soon(slot)
        if woken < CHUNK:
            for slot in slots:
                self._requested.pop(slot, None)
        return bool(self._requested)


_LONGEST = timedelta(days=36500)
