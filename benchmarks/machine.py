"""Describe the machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from tests.kit.servers import place_of_files

PACKAGES = ("outboxio", "asyncpg", "aiomysql", "msgspec")


def hardware() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{_distribution()}, Linux {platform.release()}",
        "files": f"in {place_of_files()}, where a sync takes {_microseconds_of_a_sync():,.0f} µs",
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "event loop": "asyncio"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"commit": _commit()}


def _microseconds_of_a_sync() -> float:
    """Measure the minimum cost of a durable commit: appending a page to a file and syncing it to disk."""
    with tempfile.TemporaryFile(dir=place_of_files()) as file:

        def once() -> float:
            os.write(file.fileno(), bytes(8192))
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            return (time.perf_counter() - begun) * 1e6

        return median(once() for _ in range(200))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return sys.platform


def _commit() -> str:
    here = Path(__file__).parent
    try:
        shown = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=here)
    except OSError:
        return "unknown"
    return shown.stdout.strip() or "unknown"
