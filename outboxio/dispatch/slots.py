"""What is done for each slot of this process: a share of each read, re-homing of rows, and waking of resting rows.

Slot shares: how many rows of each slot a find round reads, so that a round reads about a batch in all.

The stored handler names share the batch. The slots of a name share the part of the name, which is at most the window of
the handler. So the number of partitions of a handler changes neither the rows that the handler has ready, nor the part
of any other handler.

Re-homing: after the number of partitions of a name was changed, due rows move to the partitions they belong to now.

New rows are spread by the new number at once. A backlog from before the change would stay the work of a single process,
so the holder of each slot moves the rows of its slot that belong elsewhere, 1,000 rows with each statement, until the
end of the slot is reached. A slot is looked at after its lock was taken or the number was changed, as soon as a read of
the slot has left due rows: without a backlog there is nothing to divide. Only the holder of the slot moves rows,
between two find rounds, and never a row in flight. So no row is found and moved at the same time. The statement moves
rows only under the term of the slot's lock: a process that froze moves no row that the new holder runs. Order does not
depend on re-homing: the head of an ordering key is asked for over all partitions.

Waking: the holder of a slot makes due the resting rows that it can read, or that are past the retention.

Rows rest if only newer code can read them (``runs/resting.py``). Newer code comes with a new process, so the rows
are looked for when a slot is taken. Rows whose retention ends are looked for now and then; read once more, they expire.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from outboxio.dispatch.core import Core
from outboxio.model.lock_name import Slot
from outboxio.model.notification import BEGINNING, DeferredQuery, Position
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.resting import readable_version, rest_of
from outboxio.support.log import log_of
from outboxio.support.scan_position import FairShare

logger = log_of(__name__)

PIECE = 1000  # rows of a slot that a statement moves or makes due
LATE_COMMIT = timedelta(minutes=1)  # after the change of a number: a transaction may still make rows by the old number
LOOK_AGAIN = 600.0  # seconds until all slots are searched again for resting rows

Counts = dict[tuple[str, int], int]
"""The rows that were found of each slot."""


class SlotShares:
    """A batch divided among slots, by the rows that each slot had in the last round (``support/scan_position.py``)."""

    def __init__(self, batch_size: int) -> None:
        self._names: FairShare[str] = FairShare(batch_size)
        self._slots: dict[str, FairShare[int]] = {}
        """The shares of the partitions, for names with several partitions in this process."""

    def limits(self, cursors: Sequence[HandlerCursor]) -> list[tuple[HandlerCursor, int, int]]:
        """The rows to read of each slot, at most, and how many slots of the handler name are read."""
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

    def learn(self, asked: Sequence[Slot], counts: Mapping[tuple[str, int], int], full: Collection[Slot]) -> None:
        """Take in a round: the slots that were read, the rows that each slot had, and the slots that were full."""
        found: dict[str, int] = {}
        for slot in asked:
            found[slot.handler_name] = found.get(slot.handler_name, 0) + counts.get(slot, 0)
        self._names.learn(list(found), found, {slot.handler_name for slot in full})
        for name, shares in self._slots.items():
            ours = [slot for slot in asked if slot.handler_name == name]
            shares.learn(
                [slot.partition for slot in ours],
                {slot.partition: counts[slot] for slot in ours if slot in counts},
                {slot.partition for slot in full if slot.handler_name == name},
            )


class Rehoming:
    """The slots of this process whose rows may belong elsewhere."""

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
        """The slots that were not checked since they were taken, or since the number was changed."""
        self._owing: dict[Slot, Position] = {}
        """The slots that are not read to the end, each with the position that was reached."""
        self._wants = 0
        """How often a slot was wanted."""

    @property
    def is_wanted(self) -> bool:
        """True if a slot may have rows that belong elsewhere."""
        return bool(self._owing)

    def owes(self, handler_name: str) -> bool:
        """True if rows of a handler name may be moved. A row that is handed over must not be moved at the same time."""
        return bool(self._owing) and any(slot.handler_name == handler_name for slot in self._owing)

    def want(self, slot: Slot) -> None:
        """Look at a slot: the number of partitions was changed, or the slot was taken.

        The former holder of a slot may have moved only a part of the rows.
        """
        count = self._partitions.find(slot.handler_name)
        if self._repository is not None and count is not None and (count.number > 1 or slot.partition):
            self._unchecked.add(slot)
            cursor = self._cursors.by_slot.get(slot)
            if cursor is not None and (cursor.has_backlog or cursor.is_paused):  # a paused slot is not read
                self.has_backlog(slot)

    def has_backlog(self, slot: Slot) -> None:
        """A read of the slot has left due rows: read the slot from the beginning, if that is owed."""
        if slot in self._unchecked:
            self._unchecked.discard(slot)
            self._owing[slot] = BEGINNING
            self._wants += 1

    def forget(self, slot: Slot) -> None:
        """The slot is halted, or its lock is lost."""
        self._unchecked.discard(slot)
        self._owing.pop(slot, None)

    async def rehome_once(self) -> int:
        """Move the rows of a piece of a slot; how many rows were moved. Call this only between two find rounds."""
        assert self._repository is not None
        slot, after = next(iter(self._owing.items()))
        cursor = self._cursors.by_slot.get(slot)
        if cursor is None:  # the slot is halted, or its lock is lost
            self.forget(slot)
            return 0
        besides = [i for i, run in self._in_flight.rows.items() if slot.holds(run.notification)]
        now = self._clock()
        wants, staying = self._wants, [*besides, *self._stuck.ids]
        done = await self._repository.rehome(self._namespace, cursor.lease, after, PIECE, staying, now)
        # Otherwise the lock was lost meanwhile, or the slot is wanted from the beginning again: the number has changed,
        # or the lock was taken anew, and the statement has moved nothing under the former term.
        if slot in self._owing and wants == self._wants:
            del self._owing[slot]
            if done.position is not None and not self._is_through(slot, done.position):
                self._owing[slot] = done.position  # behind all other slots
        if done.moved:
            logger.debug(
                "moved %d rows of %s to the partitions that the rows belong to now", done.moved, slot,
                handler=slot.handler_name, partition=slot.partition,
            )  # fmt: skip
            for other in self._cursors:
                if other.slot.handler_name == slot.handler_name:
                    other.sweep_soon()
            self._wakeups.moved()
        return done.moved

    def _is_through(self, slot: Slot, reached: Position) -> bool:
        """True if the rows behind a position were made after the change, and so lie where the rows belong."""
        count = self._partitions.find(slot.handler_name)
        if count is None or slot.partition >= count.number:
            return False
        return reached[0] > count.changed_date + LATE_COMMIT


class Waking:
    """The slots of this process that may have resting rows for this process."""

    def __init__(self, core: Core) -> None:
        self._setup = core.setup
        self._cursors = core.in_flight.cursors
        self._wanted: dict[Slot, None] = {}
        self._next_look = float("inf")

    def want(self, slot: Slot) -> None:
        """The slot was taken: the code of this process may be newer than that of the former holder."""
        self._wanted[slot] = None

    def forget(self, slot: Slot) -> None:
        """The slot is halted, or its lock is lost."""
        self._wanted.pop(slot, None)

    def is_wanted(self, now: float) -> bool:
        """True if resting rows are to be looked for. ``now``: the event loop's clock."""
        return bool(self._wanted) or now >= self._next_look

    async def wake_once(self, now: float) -> bool:
        """Make rows due; True if there may be more."""
        if now >= self._next_look:
            self._wanted.update(dict.fromkeys(cursor.slot for cursor in self._cursors))
        self._next_look = now + LOOK_AGAIN
        slots, setup = list(self._wanted), self._setup
        moment, queries = setup.clock(), list[DeferredQuery]()
        for slot in slots:
            cursor = self._cursors.by_slot.get(slot)
            if cursor is not None:
                spec = cursor.queue.spec
                until = rest_of(readable_version(setup.handlers, spec.handler))
                queries.append(DeferredQuery(*slot, until, moment - min(spec.retention, _LONGEST)))
        if not queries:
            self._wanted.clear()
            return False
        woken = await setup.database.deferred.wake(setup.namespace, queries, moment, PIECE)
        if woken:
            for slot in slots:
                self._cursors.sweep_soon(slot)
        if woken < PIECE:
            for slot in slots:
                self._wanted.pop(slot, None)
        return bool(self._wanted)


_LONGEST = timedelta(days=36500)
