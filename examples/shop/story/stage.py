"""Starts and ends the processes of the shop, and sends its requests."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from .screen import Screen

HERE = Path(__file__).parent.parent
BUILD = HERE / "build"
PATIENCE = 30.0  # seconds; a step needs one or two


class Stage:
    def __init__(self, screen: Screen, database: str, port: int, client: httpx.AsyncClient) -> None:
        self.screen = screen
        self._environment = {**os.environ, "DATABASE": database}
        self._port = port
        self._client = client
        self._processes: list[asyncio.subprocess.Process] = []
        self._relays: list[asyncio.Task[None]] = []
        self._log = (BUILD / "log.txt").open("wb")

    async def run(self, *command: str) -> None:
        """Run a command to its end."""
        process = await self._start("shell", *command)
        if await process.wait() != 0:
            raise SystemExit(f"{' '.join(command)} failed; {BUILD / 'log.txt'} has the reason")

    async def start_web(self) -> None:
        await self._start("web", "uvicorn", "shop.web:app", "--port", str(self._port), "--log-level", "warning")

    async def start_worker(self) -> asyncio.subprocess.Process:
        return await self._start("worker", "outboxio", "worker", "shop.worker:outbox")

    async def send(self, method: str, path: str, **body: Any) -> httpx.Response:
        answer = await self._client.request(method, path, json=body)
        content = ", ".join(f"{key} {value}" for key, value in body.items())
        self.screen.say("client", f"{method} {path}  {content}  -> {answer.status_code}")
        return answer

    async def read(self, path: str) -> Any:
        """The JSON of a resource; ``None`` if there is no such resource."""
        answer = await self._client.get(path)
        return answer.json() if answer.status_code == 200 else None

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a condition. Raises :class:`TimeoutError` if the condition never holds."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with suppress(httpx.ConnectError):
                    if await condition():
                        return
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self._processes), *self._relays)
        self._log.close()

    async def _start(self, who: str, module: str, *arguments: str) -> asyncio.subprocess.Process:
        self.screen.say(who, f"$ {module} {' '.join(arguments)}")
        program = Path(sys.executable).with_name(module) if module != "python" else Path(sys.executable)
        process = await asyncio.create_subprocess_exec(
            program, *arguments, cwd=HERE, env=self._environment, stdout=asyncio.subprocess.PIPE, stderr=self._log
        )
        assert process.stdout is not None
        self._processes.append(process)
        self._relays.append(asyncio.create_task(self.screen.relay(who, process.stdout)))
        return process


@asynccontextmanager
async def open_stage(screen: Screen, database: str, port: int | None) -> AsyncGenerator[Stage]:
    BUILD.mkdir(exist_ok=True)
    port = port or _free_port()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
        stage = Stage(screen, database, port, client)
        try:
            yield stage
        finally:
            await stage.end()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number
