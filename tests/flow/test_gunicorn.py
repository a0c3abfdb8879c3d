"""``gunicorn --preload``: the application is imported once, and every worker is forked from the master process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from outboxio import Outbox
from tests.kit.app import eventually

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="gunicorn needs fork"),
    pytest.mark.with_tables,
    pytest.mark.above_statements,
]


@asynccontextmanager
async def gunicorn(
    worker: str, url: str, socket: Path, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gunicorn", "tests.kit.preloaded:app", "--preload", "--workers", "2",
        "--worker-class", worker, "--bind", f"unix:{socket}", "--timeout", "0",
        cwd=ROOT, env={**os.environ, "DATABASE": url, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(90):
            await process.communicate()


async def answer(socket: Path) -> dict[str, object]:
    reader, writer = await asyncio.open_unix_connection(str(socket))
    writer.write(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
    await writer.drain()
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 " in head.partition(b"\r\n")[0], head
    found: dict[str, object] = json.loads(body)
    return found


@pytest.mark.parametrize("worker", ["asgi", "uvicorn.workers.UvicornWorker"])
async def test_each_worker_of_a_preloaded_application_has_its_own_name(
    database_url: str, tmp_path: Path, worker: str
) -> None:
    socket, owners = tmp_path / "g", dict[object, object]()
    requests = 0

    async def accepts_connections() -> bool:
        # gunicorn binds the socket, which creates the file, before it listens.
        with suppress(FileNotFoundError, ConnectionRefusedError):
            _, writer = await asyncio.open_unix_connection(str(socket))
            writer.close()
            return True
        return False

    async def both_answered() -> bool:
        nonlocal requests
        for seen in await asyncio.gather(*(answer(socket) for _ in range(10))):
            requests += 1
            owners[seen["process"]] = seen["owner"]
        return len(owners) == 2

    async with gunicorn(worker, database_url, socket), Outbox(database_url, namespace="app") as outbox:
        await eventually(accepts_connections)
        await eventually(both_answered)
        assert len(set(owners.values())) == 2
        assert all(str(owner).split(":")[1] == str(process) for process, owner in owners.items())

        async def all_reported() -> bool:
            seen = {instance.instance for instance in (await outbox.admin.overview()).instances}
            return seen == set(owners.values())

        async def all_handled() -> bool:
            counts = await outbox.admin.counts()
            return counts["SUCCEEDED"] == requests

        await eventually(all_reported)
        await eventually(all_handled)
        assert {lock.owner for lock in await outbox.admin.locks()} <= set(owners.values())


async def test_workers_do_not_start_if_the_outbox_was_used_at_import(database_url: str, tmp_path: Path) -> None:
    async with gunicorn("uvicorn.workers.UvicornWorker", database_url, tmp_path / "g", OPEN="1") as process:
        async with asyncio.timeout(90):
            said, _ = await process.communicate()
    assert process.returncode != 0, said.decode()  # 3, or 1 if gunicorn reaps both workers at once
    assert b"WrongProcess: the outbox of namespace 'app' was opened in process %d" % process.pid in said
