"""A session ended by the server counts as unreachable, even if its socket stays open."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest

from outboxio.storage.postgres.errors import is_transient, is_unreachable
from tests.kit.app import Look
from tests.kit.serving import serving

_FIELDS = b"SNOTICE\0VNOTICE\0C00000\0Mthe session has ended\0\0"
NOTICE = b"N" + struct.pack("!I", len(_FIELDS) + 4) + _FIELDS


@asynccontextmanager
async def sockets_that_stay_open(url: str) -> AsyncIterator[str]:
    """The URL of a proxy that keeps the client's socket open, and sends a notice when the server ended the session."""
    parts = urlsplit(url)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port or 5432)
        from_client = asyncio.create_task(forward(reader, to_server))
        try:
            await forward(from_server, writer)
            writer.write(NOTICE)
            await asyncio.gather(from_client, return_exceptions=True)
        finally:
            from_client.cancel()
            to_server.close()

    async with serving(link) as port:
        yield parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}").geturl()


async def test_a_statement_on_a_terminated_session_means_unreachable(postgres_url: str) -> None:
    ended = asyncio.Event()
    async with sockets_that_stay_open(postgres_url) as url:
        connection = await asyncpg.connect(url)
        connection.add_log_listener(lambda *notice: ended.set())  # the driver reads it after the server's last message
        await Look(postgres_url).fetch("SELECT pg_terminate_backend($1)", connection.get_server_pid())
        await ended.wait()
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
