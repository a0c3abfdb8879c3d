"""SIGINT and SIGTERM for commands that go on until a signal comes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signalled() -> Generator[asyncio.Event]:
    """An event that the first signal sets.

    The signal handler is Python's and not the event loop's, so that a second signal ends the process even while a
    handler of the application blocks the loop: that is when people signal twice (decision 25).
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def caught(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, caught) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
