"""The progress of a peer in one of several processes, for ``benchmarks/scale.py``.

The process prints a line of JSON every 50 ms: how much is done, and the processor time; the first line says ``ready``.
A line on standard input is the sign to begin; the end of the input ends the process.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable

EVERY = 0.05  # seconds


async def work(begin: Callable[[], Awaitable[object]], done: Callable[[], int]) -> None:
    """Begin when told, and report until the input ends."""
    told, ended = asyncio.Event(), asyncio.Event()

    def read() -> None:
        (told if os.read(0, 100) else ended).set()

    asyncio.get_running_loop().add_reader(0, read)
    _tell(0, ready=True)
    await told.wait()
    working = asyncio.ensure_future(begin())
    while not ended.is_set():
        if working.done():
            working.result()
        _tell(done(), ready=True)
        await asyncio.sleep(EVERY)
    os._exit(0)  # what the peer would do to leave is not measured


def _tell(done: int, *, ready: bool) -> None:
    line = {"at": time.monotonic(), "done": done, "cpu": time.process_time(), "ready": ready}
    os.write(1, json.dumps(line).encode() + b"\n")
