"""An event loop in a background thread, for database calls of the tests themselves."""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Coroutine
from threading import Thread
from typing import Any, TypeVar

from outboxio import Outbox

T = TypeVar("T")


class _Apart:
    def __init__(self) -> None:
        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = Thread(target=self.loop.run_forever, name="tests background loop", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        if self.process == os.getpid():  # a forked process does not have the thread
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


_apart: _Apart | None = None


def _loop() -> asyncio.AbstractEventLoop:
    global _apart
    if _apart is None or _apart.process != os.getpid():
        _apart = _Apart()
    return _apart.loop


def run_in_background(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result; blocks the calling thread."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


async def in_background(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result; only the calling task waits."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


async def migrate(url: str) -> None:
    """Create outboxio's tables in a database."""
    async with Outbox(url, namespace="tables") as outbox:
        await outbox.migrate()
