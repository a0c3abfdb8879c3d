"""A server for a test that closes all its connections, including one that has just arrived.

``asyncio.Server`` loses a connection that it has accepted but not yet handed over when it is closed. The garbage
collector reports it later, in another test.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve a connection by closing it."""


@asynccontextmanager
async def serving(serve: Serve, host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> AsyncGenerator[int]:
    """Yield the port of a server that calls ``serve`` for each connection, and then closes the connection."""
    loop = asyncio.get_running_loop()
    tasks: dict[asyncio.Task[None], socket.socket] = {}

    async def run(accepted: socket.socket) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        with suppress(OSError):  # the client does not trust the certificate, or is gone
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            try:
                await serve(reader, writer)
                writer.close()
                await writer.wait_closed()
            finally:
                transport.abort()

    def ended(task: asyncio.Task[None]) -> None:
        tasks.pop(task).close()  # a task that was cancelled before its first step has not closed it
        if not task.cancelled():
            task.result()

    def accept() -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):  # the client has disconnected before
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            task = loop.create_task(run(accepted))
            tasks[task] = accepted
            task.add_done_callback(ended)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        listener.setblocking(False)
        loop.add_reader(listener, accept)
        try:
            yield listener.getsockname()[1]
        finally:
            loop.remove_reader(listener)
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
