"""The proxy of the tests leaks no connection: otherwise a later test fails with a warning about an unclosed socket."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from urllib.parse import urlsplit

import pytest

from tests.kit.proxy import Proxy


@pytest.mark.parametrize("turns", range(6))
async def test_a_proxy_that_stops_closes_a_connection_that_just_arrived(turns: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        proxy = Proxy(f"mysql://app@127.0.0.1:{server.getsockname()[1]}/app")
        await proxy.start()
        with socket.create_connection(("127.0.0.1", urlsplit(proxy.url).port or 0)):
            for _ in range(turns):  # of the event loop, each with the next step of taking the connection
                await asyncio.sleep(0)
            await proxy.stop()
        gc.collect()
    assert [str(each.message) for each in warned] == []
