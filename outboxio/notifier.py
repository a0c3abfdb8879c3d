"""Waking other processes: the first wake-up at once, further ones of a burst together.

Sent after the commit and on another connection, never inside a business transaction: NOTIFY there takes a lock of the
whole database cluster at COMMIT, and more than halves its throughput.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from outboxio.waiting import Signal

logger = logging.getLogger(__name__)

PAUSE = 0.05  # seconds between two wake-ups of one process
LONGEST_GAP = PAUSE + 0.02  # seconds until the next one comes, sent and heard, while there is something to wake for


class Notifier:
    """Sends one kind of wake-up, at most one per pause. A wake-up that fails is only logged: polling is the truth.

    Its task lasts as long as a burst does.
    """

    def __init__(self, send: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._hurry = Signal()
        self._task: asyncio.Task[None] | None = None
        self._due = False
        self._closing = False
        self.failures = 0

    def poke(self) -> None:
        """Wake the others soon; costs next to nothing when one is due already."""
        self._due = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="outboxio notifier")

    async def close(self) -> None:
        """Send what is due, and end."""
        task = self._task
        if task is not None and not task.done():
            self._closing = True
            self._hurry.set()
            try:
                await asyncio.wait([task])
            finally:
                self._closing = False

    async def _run(self) -> None:
        while self._due:
            await self._send_once()
            if not self._closing:
                await self._hurry.wait(PAUSE)

    async def _send_once(self) -> None:
        self._due = False
        try:
            await self._send()
            self.failures = 0
        except Exception as error:
            self.failures += 1
            logger.log(
                logging.WARNING if self.failures == 1 else logging.DEBUG,
                "a wake-up could not be sent, other processes will find the work by polling: %r", error,
            )  # fmt: skip
