"""How the sockets of connections to a server are configured."""

from __future__ import annotations

import asyncio
from typing import Any

from outboxio.storage.connections.driver import READ_SIZE, configure
from tests.kit.serving import hang_up, serving


async def test_answers_are_received_into_buffers_that_the_heap_keeps() -> None:
    async with serving(hang_up) as port:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", port)
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
