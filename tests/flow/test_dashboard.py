"""``outboxio dashboard`` in a separate process: on a bare database, and only local without a password."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outboxio import Outbox
from outboxio.cli.commands import dashboard as command
from outboxio.cli.commands.dashboard import Serving, is_loopback, refuse_open
from outboxio.cli.target import TargetError

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """A database with tables and without application code."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    async with Outbox(url, namespace="shop") as outbox:
        await outbox.migrate()
    return url


@asynccontextmanager
async def served(*arguments: str, **environ: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """The command, and its JSON output."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OUTBOXIO_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outboxio.cli", "dashboard", "--port", "0", "--json", *arguments),
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE):
            output = await process.stdout.readuntil(b"}\n")
        yield process, json.loads(output)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_bare_database_is_served_locally_until_a_signal(url: str) -> None:
    async with served("--database", url, "--namespace", "shop") as (process, output):
        async with httpx.AsyncClient(base_url=output["url"], timeout=PATIENCE) as client:
            page = await client.get("/")
            by_a_foreign_name = await client.get("/", headers={"host": "evil.example:8900"})
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            code = await process.wait()

    assert page.status_code == 200
    assert "shop" in page.text
    assert (by_a_foreign_name.status_code, by_a_foreign_name.text) == (404, "Not Found")
    assert code == 0


async def test_the_address_is_printed_once_it_accepts_connections(
    url: str, monkeypatch: pytest.MonkeyPatch, in_process: None
) -> None:
    reached: list[int] = []

    def connect(namespace: str, host: str, port: int, *, as_json: bool) -> None:
        with socket.create_connection((host, port), timeout=PATIENCE):
            reached.append(port)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(command, "_print_address", connect)
    async with Outbox(url, namespace="shop") as outbox:
        assert await command.serve(outbox, Serving("127.0.0.1", 0)) == 0
    assert len(reached) == 1


async def test_with_a_password_every_browser_must_log_in(url: str) -> None:
    arguments = ("--database", url, "--namespace", "shop", "--auth-env", "PASSWORD", "--user", "ada", "--read-only")
    async with (
        served(*arguments, PASSWORD="sesame") as (_, output),
        httpx.AsyncClient(base_url=output["url"], timeout=PATIENCE) as client,
    ):
        anonymous = await client.get("/")
        page = await client.get("/", auth=("ada", "sesame"))

    assert anonymous.status_code == 401
    assert page.status_code == 200
    assert "read only" in page.text


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "db.example.org", "localhost.evil.test"])
def test_a_network_address_needs_a_password(host: str) -> None:
    with pytest.raises(TargetError, match=r"can be reached from other machines: add --auth-env"):
        refuse_open(Serving(host, 8900))
    refuse_open(Serving(host, 8900, auth_env="PASSWORD"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_a_local_address_needs_no_password(host: str) -> None:
    assert is_loopback(host)
    refuse_open(Serving(host, 8900))
