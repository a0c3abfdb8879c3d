"""Prepare and close an outbox from a fixture that is not a coroutine.

Pytest plugins run coroutines in event loops of a function, a module or a session. An async fixture would bind the
outbox to one of these loops, and a test with a different loop would be refused. So the fixtures of outboxio are plain
functions: they create the tables in a thread with its own event loop, which is closed at once, and the outbox then
binds to the loop of the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outboxio.outbox import Outbox

# pyright: reportPrivateUsage=false

CLOSES_WITHIN = 10.0  # seconds


def is_unused(outbox: Outbox) -> bool:
    """True if no event loop has used the outbox, or the outbox was closed."""
    return outbox._guard.loop is None


def prepare(outbox: Outbox) -> None:
    """Create the tables. Afterwards any event loop may use the outbox."""

    async def work() -> None:
        await outbox.migrate()
        # A connection to a server belongs to its event loop. SQLite in memory would lose the tables.
        if not all(shard.database.has_one_writer for shard in outbox._shards.values()):
            await outbox.close()

    _in_thread(work)


def close(outbox: Outbox) -> None:
    """Close the outbox in its own event loop, or in a new one if that loop is closed."""
    loop = outbox._guard.loop
    if loop is None or loop.is_closed():
        _in_thread(outbox.close)
    elif loop.is_running():  # in a different thread: the portal of a test client
        asyncio.run_coroutine_threadsafe(outbox.close(), loop).result(CLOSES_WITHIN)
    else:
        loop.run_until_complete(outbox.close())


def _in_thread(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in a thread, so that the event loop of this thread is not affected."""
    with ThreadPoolExecutor(1, "outboxio-fixture") as thread:
        thread.submit(lambda: asyncio.run(work())).result()
