"""The lines of this process: the tasks that want the same key wait in the order of arrival."""

from __future__ import annotations

import asyncio

from outboxio.model.lock_name import LockName


class Line:
    """The tasks that want a key. The task with the turn holds the key, or waits for a different process."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.tasks = 0


class Lines:
    """A line for each key that a task wants."""

    def __init__(self) -> None:
        self._lines: dict[LockName, Line] = {}

    async def enter(self, name: LockName, until: float | None) -> None:
        """Wait for the turn. Raises :class:`TimeoutError` at the moment ``until`` of the event loop's clock."""
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line()
        line.tasks += 1
        try:
            if until is None or line.tasks == 1:  # without a wait, and without a timer
                await line.turn.acquire()
            else:
                async with asyncio.timeout_at(until):
                    await line.turn.acquire()
        except BaseException:
            self._forget(name, line)
            raise

    def leave(self, name: LockName) -> None:
        """Give the turn to the next task."""
        line = self._lines[name]
        line.turn.release()
        self._forget(name, line)

    def _forget(self, name: LockName, line: Line) -> None:
        line.tasks -= 1
        if not line.tasks:
            del self._lines[name]
