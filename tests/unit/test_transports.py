"""How the sockets of connections to a server are configured."""

from __future__ import annotations

import asyncio
from typing import Any

from outboxio.storage.connections.driver import READ_SIZE, configure


async def test_answers_are_received_into_buffers_that_the_heap_keeps() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port)
        before: Any = transport
        assert before.max_size > READ_SIZE, "asyncio receives into smaller buffers now: drop ours"
        configure(transport)
        assert before.max_size == READ_SIZE
        transport.close()


def test_a_transport_without_a_size_is_unchanged() -> None:
    class Transport(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return default

    transport = Transport()
    configure(transport)
    assert not hasattr(transport, "max_size")
