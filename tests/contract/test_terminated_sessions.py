"""A session ended by the server counts as unreachable, even if its socket stays open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest

from outboxio.storage.postgres.errors import is_transient, is_unreachable
from tests.kit.app import Look


@asynccontextmanager
async def sockets_that_stay_open(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The URL of a proxy that keeps the client's socket open, and an event: the server ended a session."""
    parts, tasks, ended = urlsplit(url), list[asyncio.Task[None]](), asyncio.Event()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port or 5432)
        from_client = asyncio.create_task(forward(reader, to_server))
        await forward(from_server, writer)
        ended.set()
        await asyncio.gather(from_client, return_exceptions=True)
        for end in (writer, to_server):
            end.close()
            await asyncio.gather(end.wait_closed(), return_exceptions=True)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(link(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}").geturl(), ended
    finally:
        server.close()
        await asyncio.gather(*tasks)


async def test_a_statement_on_a_terminated_session_means_unreachable(postgres_url: str) -> None:
    async with sockets_that_stay_open(postgres_url) as (url, ended):
        connection = await asyncpg.connect(url)
        await Look(postgres_url).fetch("SELECT pg_terminate_backend($1)", connection.get_server_pid())
        await ended.wait()
        for _ in range(50):  # turns of the event loop, in which the driver reads the server's last message
            await asyncio.sleep(0)
        with pytest.raises(asyncpg.InternalClientError) as caught:
            await connection.execute("SELECT 1")
        connection.terminate()
    assert is_unreachable(caught.value)
    assert not is_transient(caught.value)


def test_an_outdated_plan_does_not_mean_unreachable() -> None:
    """asyncpg raises it as an InternalClientError too."""
    error = asyncpg.OutdatedSchemaCacheError("outdated")
    assert isinstance(error, asyncpg.InternalClientError)
    assert is_transient(error)
    assert not is_unreachable(error)
