"""Measure a peer that is written in Python. Shared by the peers' scripts, and run in a peer's environment.

``drain`` prints the figures of a whole backlog as one line of JSON. For ``benchmarks/scale.py``, the role ``fill``
only writes the backlog, and the role ``work`` prints a line of JSON every 50 ms: the events done so far, and the
processor time. A line on standard input starts the work; the end of the input stops the process.
"""

import asyncio
import json
import logging
import os
import sys
import time

LOOK_EVERY = 0.005  # seconds, the same as for outboxio
REPORT_EVERY = 0.05  # seconds


class Peer:
    """A peer's program. Its handler adds one to ``handled``."""

    handled = 0

    def __init__(self, url):
        self.url = url

    async def open(self):
        """Connect, and register the handler."""

    async def fill(self, events):
        """Commit the backlog."""
        raise NotImplementedError  # each peer has its own

    async def work(self):
        """Handle the backlog and all later events."""
        raise NotImplementedError  # each peer has its own

    async def is_done(self):
        """True if no job is unfinished in the database."""
        raise NotImplementedError  # each peer has its own


def run(kind, loop_factory=None):
    """Run the task in the command line with a peer of this class."""
    logging.disable(logging.WARNING)  # log lines per job would be measured too
    task = json.loads(sys.argv[1])
    role = task["options"].get("role", "drain")
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run({"fill": _fill, "work": _work, "drain": _drain}[role](kind(task["url"]), task["options"]["events"]))


async def forever():
    """Wait forever, for peers that work in their own tasks or threads."""
    await asyncio.Event().wait()


async def _fill(peer, events):
    await peer.open()
    await peer.fill(events)
    os._exit(0)


async def _drain(peer, events):
    await peer.open()
    await peer.fill(events)
    begun, cpu = time.perf_counter(), time.process_time()
    working = asyncio.ensure_future(peer.work())
    while peer.handled < events or not await peer.is_done():
        if working.done():
            working.result()
        await asyncio.sleep(LOOK_EVERY)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    _print(units=events, seconds=seconds, rate=events / seconds, cpu_us=cpu / events * 1e6)
    os._exit(0)  # the peer's shutdown is not measured


async def _work(peer, _events):
    await peer.open()
    started, ended = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_reader(0, lambda: (started if os.read(0, 100) else ended).set())
    _progress(peer)
    await started.wait()
    working = asyncio.ensure_future(peer.work())
    while not ended.is_set():
        if working.done():
            working.result()
        _progress(peer)
        await asyncio.sleep(REPORT_EVERY)
    os._exit(0)


def _progress(peer):
    _print(at=time.monotonic(), done=peer.handled, cpu=time.process_time(), ready=True)


def _print(**figures):
    os.write(1, json.dumps(figures).encode() + b"\n")
