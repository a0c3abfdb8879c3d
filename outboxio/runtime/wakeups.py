"""Wake-ups between processes: the first one of a burst is sent at once, and the others are merged.

A wake-up is sent after the commit and on a separate connection, never inside the transaction of an action. A NOTIFY
inside the transaction takes a cluster-wide lock at COMMIT, which more than halves the throughput of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from outboxio.support.aio import Signal
from outboxio.support.log import log_of

logger = log_of(__name__)

PAUSE = 0.05  # seconds between two wake-ups of a process
LONGEST_GAP = PAUSE + 0.02  # seconds until the next wake-up of a burst has been sent and received


class WakeupSender:
    """Sends one kind of wake-up, at most once per pause. Its task lasts as long as a burst.

    A wake-up that fails is only logged, because polling finds the rows later.
    """

    def __init__(self, send: Callable[[], Awaitable[None]], shard: str | None = None) -> None:
        """``shard``: for the log."""
        self._send = send
        self._shard = shard
        self._hurry = Signal()
        self._task: asyncio.Task[None] | None = None
        self._due = False
        self._closing = False
        self.failures = 0

    def send_soon(self) -> None:
        """Send a wake-up soon. The call costs nearly nothing if one is already due."""
        self._due = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="outboxio notifier")

    async def close(self) -> None:
        """Send the wake-up that is due, if any, and end the task."""
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
                "could not send a wake-up; other processes find the work by polling: %s", error,
                shard=self._shard, failures=self.failures,
            )  # fmt: skip
