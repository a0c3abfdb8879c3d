"""Measure what work costs this process and its database: time, CPU, messages, statements, WAL."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg

from benchmarks.task import Figures
from tests.kit.app import Look
from tests.kit.wire import Wire, watched

STATISTICS_ARE_WRITTEN_WITHIN = 2.0  # seconds after the end of a session
_PAGE = 4096


class Meter:
    """Measures from :meth:`start` to :meth:`stop`; the figures are complete after the ``metered`` block."""

    def __init__(self, wire: Wire, url: str, dialect: str) -> None:
        self._wire = wire
        self._look = Look(url)
        self._has_wire = dialect != "sqlite"
        self._has_wal = dialect == "postgres"
        self._before: tuple[float, float, float | None, int, int] | None = None
        self._wal_before: Sequence[int] = ()
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.busy: float | None = None
        """The share of time in which the machine's cores were busy with any process."""
        self.statements = 0
        self.round_trips = 0
        self.wal_bytes: int | None = None
        self.wal_records: int | None = None

    async def start(self) -> None:
        if self._has_wal:
            self._wal_before = await _wal_written(self._look)
        statements, round_trips = self._wire.statements, self._wire.round_trips  # counting takes a while
        self._before = time.perf_counter(), time.process_time(), busy_seconds(), statements, round_trips

    def stop(self) -> None:
        assert self._before is not None, "stop() was called before start()"
        begun, cpu, busy, statements, round_trips = self._before
        self.seconds, self.cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
        if busy is not None and (busy_now := busy_seconds()) is not None:
            self.busy = (busy_now - busy) / self.seconds / (os.cpu_count() or 1)
        self.statements = self._wire.statements - statements
        self.round_trips = self._wire.round_trips - round_trips

    async def read_wal(self) -> None:
        """Read the WAL counters, after the sessions that wrote it are closed."""
        if self._wal_before:
            now = await _wal_written(self._look)
            self.wal_bytes, self.wal_records = now[0] - self._wal_before[0], now[1] - self._wal_before[1]

    def per(self, units: int) -> Figures:
        """Return the figures per event or action."""
        figures = {
            "units": units,
            "seconds": self.seconds,
            "rate": units / self.seconds,
            "cpu_us": self.cpu_seconds / units * 1e6,
            "statements": self.statements / units,
        }
        if self.busy is not None:
            figures["busy"] = self.busy
        if self._has_wire:
            figures["round_trips"] = self.round_trips / units
        if self.wal_bytes is not None and self.wal_records is not None:
            figures |= {"wal_bytes": self.wal_bytes / units, "wal_records": self.wal_records / units}
        return figures


@asynccontextmanager
async def metered(url: str, dialect: str) -> AsyncIterator[Meter]:
    """Yield a meter for work on a database. Open and close the connections to be measured inside the block."""
    with watched() as wire:
        meter = Meter(wire, url, dialect)
        yield meter
    await meter.read_wal()


def busy_seconds() -> float | None:
    """Return the total busy time of this machine's cores, or None if the system does not report it."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=8)
    except OSError:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, words[1:8])
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


async def _wal_written(look: Look) -> Sequence[int]:
    """Return the WAL bytes and records of the whole server. Sessions report theirs when they are idle or end."""
    found, deadline = (-1, -1), time.monotonic() + STATISTICS_ARE_WRITTEN_WITHIN
    while time.monotonic() < deadline:
        last = found
        [row] = await look.fetch(
            "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint AS bytes, wal_records::bigint AS records "
            "FROM pg_stat_wal"
        )
        found = row["bytes"], row["records"]
        if found == last:
            break
        await asyncio.sleep(0.2)
    return found


async def checkpoint(url: str, dialect: str) -> None:
    """Write a checkpoint, so that every run starts alike: the first change to a page after it logs the whole page."""
    if dialect == "postgres":
        with suppress(asyncpg.InsufficientPrivilegeError):
            await Look(url).fetch("CHECKPOINT")


def resident_bytes() -> int:
    """Return the current memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def percentiles(seconds: Sequence[float]) -> Figures:
    """Return the median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": ordered[len(ordered) // 2] * 1e3,
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3,
    }
