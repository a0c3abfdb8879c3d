"""Stranded keys: BLOCKED rows that no process would unblock.

A row is unblocked by the process that ends the preceding row. That does not happen after a crash, after an operator or
retention has ended the preceding row, and when another process ends that row just before this process blocks the next
row. So a process reads the heads of all keys from time to time: a key with a BLOCKED head is stranded. The keys of a
handler name are read by the process that holds partition 0 of the name, because several processes would do equal work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from outboxio.model.notification import State
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.key_queues import KeyRows

PIECE = 1000  # keys, or rows, that a statement reads
SHORTEST_PAUSE = 1.0  # seconds between two sweeps of the keys
SHARE_OF_TIME = 50  # the pause after a sweep is at least so many times as long as the sweep took


class StrandedKeys:
    """Finds and unblocks the stranded keys of a shard."""

    def __init__(self, rows: KeyRows) -> None:
        self._rows = rows
        self._next = float("-inf")
        self._is_wanted = False
        self._read_to: dict[str, Any] = {}

    def sweep_soon(self) -> None:
        """A lock was taken: the former holder may have left keys stranded."""
        self._next = float("-inf")

    def want_sweep(self) -> None:
        """Rows may have ended elsewhere: make sure that a sweep follows in time."""
        self._is_wanted = True

    @property
    def next_sweep(self) -> float | None:
        """The moment of the next sweep that has to be made, by the event loop's clock; ``None`` if none has to be."""
        return self._next if self._is_wanted else None

    def is_due(self, now: float) -> bool:
        return now >= self._next

    async def sweep(self, cursors: Iterable[HandlerCursor]) -> None:
        """Unblock a piece of the stranded rows of each handler name of which this process holds partition 0."""
        time = asyncio.get_running_loop().time
        began, is_through = time(), True
        self._is_wanted = False
        for cursor in cursors:
            queue, (name, partition) = cursor.queue, cursor.slot
            if partition:
                continue
            if queue.handler.options.ordered:
                is_through &= await self._sweep_keys(queue, name)
            if queue.spec.strict_types:
                is_through &= await self._sweep_strict(name)
        pause = SHARE_OF_TIME * (time() - began)
        self._next = began + (max(pause, SHORTEST_PAUSE) if is_through else pause)
        self._is_wanted |= not is_through

    async def _sweep_keys(self, queue: HandlerQueue, name: str) -> bool:
        """Read a piece of the keys of a stored handler name; True for the last piece."""
        rows, after = self._rows, self._read_to.get(name)
        heads = await rows.repository.heads_after(rows.namespace, name, after, PIECE, parks=queue.spec.parks)
        self._read_to[name] = next(reversed(heads)) if len(heads) >= PIECE else None
        suspected = [key for key, head in heads.items() if head.state == State.BLOCKED]
        confirmed = await rows.heads(queue, suspected)  # the head under every name of the handler
        await rows.unblock(queue, [key for key, head in confirmed.items() if head.state == State.BLOCKED])
        return len(heads) < PIECE

    async def _sweep_strict(self, name: str) -> bool:
        """Read a piece of the rows that wait for handlers of lower number; True for the last piece."""
        rows, place = self._rows, f"#{name}"
        after: int = self._read_to.get(place, -1)
        blocked = await rows.repository.find_blocked(rows.namespace, [name], after, PIECE)
        self._read_to[place] = blocked[-1][0] if len(blocked) >= PIECE else -1
        if blocked:
            await rows.release({event_id for _, event_id in blocked})
        return len(blocked) < PIECE
