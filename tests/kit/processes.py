"""Start worker processes, and wait for their reports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kit.forked import Started, start

ROOT = Path(__file__).parents[2]

Report = dict[str, Any]


class Worker:
    """A process that runs ``worker.py``, and its reports so far.

    The reports include everything that the process has written, even if the event loop of the test has not read it yet.
    So a test that sees the outcome of a run in the database also sees the report of the run.
    """

    def __init__(self, process: Started, output: int) -> None:
        self._process = process
        self._output = output
        self._reports: list[Report] = []
        self._rest = b""
        self._has_closed = False
        self._arrived = asyncio.Event()
        os.set_blocking(output, False)
        asyncio.get_running_loop().add_reader(output, self._read)

    @classmethod
    async def start(
        cls,
        database: str,
        *handlers: dict[str, Any],
        freezes_in_settlement: bool = False,
        dies_with_outcome: int = 0,
        given_pool: bool = False,
        roles: dict[str, bool] | None = None,
        **settings: Any,
    ) -> Worker:
        arguments = {
            "database": database,
            "handlers": handlers,
            "settings": settings,
            "roles": roles or {},
            "freezes_in_settlement": freezes_in_settlement,
            "dies_with_outcome": dies_with_outcome,
            "given_pool": given_pool,
        }
        return await cls.start_program("tests.flow.worker", **arguments)

    @classmethod
    async def start_program(cls, program: str, **arguments: Any) -> Worker:
        """Start a different program that reports in the same way."""
        process, output = await start(program, json.dumps(arguments))
        return cls(process, output)

    @property
    def reports(self) -> list[Report]:
        self._read()
        return self._reports

    @property
    def is_gone(self) -> bool:
        self._read()
        return self._has_closed

    def of(self, what: str, **like: Any) -> list[Report]:
        """The reports of a kind, with the given details."""
        return [r for r in self.reports if r["what"] == what and all(r.get(k) == v for k, v in like.items())]

    async def until(self, what: str, number: int = 1, timeout: float = 60, **like: Any) -> list[Report]:
        """Wait until the worker has sent so many such reports, and return them."""
        await self.until_it(lambda: len(self.of(what, **like)) >= number, timeout)
        return self.of(what, **like)

    async def until_it(self, holds: Callable[[], bool], timeout: float = 60) -> None:
        """Wait until a condition on the reports holds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                self._arrived.clear()  # before the reports are read, by either condition
                while not (holds() or self.is_gone):
                    await self._arrived.wait()
                    self._arrived.clear()
        assert holds(), f"not reported: {self.reports[-20:]}"

    async def until_running(self, *locks: str) -> None:
        """Wait until the worker runs, and holds the given locks."""
        await self.until("running", timeout=60)
        for lock in locks:
            await self.until("taken", lock=lock)

    @property
    def amounts(self) -> list[int]:
        """The amounts of the handler calls, in order."""
        return [report["amount"] for report in self.of("call")]

    def open_gate(self) -> None:
        self._process.stdin.write(b"open\n")

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        """Ask the worker to shut down."""
        self._process.terminate()

    async def leave(self) -> None:
        """Ask the worker to shut down, and wait until it has exited cleanly."""
        await self.until("running")  # before that the worker has no signal handler
        self.terminate()
        await self.until("left")
        assert await self._process.wait() == 0

    async def end(self) -> None:
        """End the worker, whatever the state of the test."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.stdin.close()
        await self._process.wait()
        while not self.is_gone:
            self._arrived.clear()
            await self._arrived.wait()

    def _read(self) -> None:
        """Read what the process has written so far."""
        while not self._has_closed:
            try:
                written = os.read(self._output, 2**16)
            except BlockingIOError:
                return
            if not written:
                self._has_closed = True
                asyncio.get_running_loop().remove_reader(self._output)
                os.close(self._output)
            *lines, self._rest = (self._rest + written).split(b"\n")
            self._reports += map(json.loads, lines)
            self._arrived.set()
