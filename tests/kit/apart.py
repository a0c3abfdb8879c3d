"""The event loop of the tests' own database calls: in a thread of its own, whatever the loop of the test does."""

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
        self._thread = Thread(target=self.loop.run_forever, name="tests apart", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        if self.process == os.getpid():  # a forked process has no such thread
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


_apart: _Apart | None = None


def _loop() -> asyncio.AbstractEventLoop:
    global _apart
    if _apart is None or _apart.process != os.getpid():
        _apart = _Apart()
    return _apart.loop


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; the caller's thread waits."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


async def apart(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; only the caller's task waits."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


async def migrate(url: str) -> None:
    """Create outboxio's tables in a database."""
    async with Outbox(url, namespace="tables") as outbox:
        await outbox.migrate()
