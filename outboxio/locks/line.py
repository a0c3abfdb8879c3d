"""The order of tasks within this process: one task at a time asks the server for a key, and the rest waits in line."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from outboxio.errors import LockDeadlock, LockHeld
from outboxio.model.lock_name import LockName

Place = tuple[str, LockName]
"""A key on a shard."""

Task = asyncio.Task[Any]


class Line:
    """The tasks of this process that want one key: the head asks the server or holds the lock, the rest waits."""

    def __init__(self, key: str, head: Task) -> None:
        self.key = key
        self.head = head
        self.waiting: deque[tuple[asyncio.Future[None], Task]] = deque()


class Lines:
    """All lines of an outbox. Recognises tasks that would wait for themselves or for each other."""

    def __init__(self) -> None:
        self._lines: dict[Place, Line] = {}
        self._wants: dict[Task, Place] = {}

    async def enter(self, place: Place, key: str, task: Task) -> None:
        """Wait until ``task`` is the head of the line. The caller calls :meth:`leave` in any case after this returns.

        Raises :class:`LockHeld` and :class:`LockDeadlock` before the task waits.
        """
        line = self._lines.get(place)
        if line is None:
            self._lines[place] = Line(key, task)
            return
        self._refuse_circle(place, key, task)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append((turn, task))
        self._wants[task] = place
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the turn came together with the cancellation
                self.leave(place)
            raise
        finally:
            self._wants.pop(task, None)

    def leave(self, place: Place) -> None:
        """The head of the line has given the lock back, or up: the next task is the head."""
        line = self._lines[place]
        while line.waiting:
            turn, task = line.waiting.popleft()
            if not turn.done():
                line.head = task
                turn.set_result(None)
                return
        del self._lines[place]

    def _refuse_circle(self, place: Place, key: str, task: Task) -> None:
        chain: list[str] = []
        at: Place | None = place
        while at is not None and (line := self._lines.get(at)) is not None and len(chain) <= len(self._lines):
            chain.append(line.key)
            if line.head is task:
                shard = place[0]
                raise LockHeld(key, shard) if len(chain) == 1 else LockDeadlock(key, shard, tuple(chain))
            at = self._wants.get(line.head)
