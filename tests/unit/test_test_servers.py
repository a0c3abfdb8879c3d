"""The servers of the tests leak no connection, or a later test fails with a warning; and no test waits in vain."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from tests.kit.processes import Worker
from tests.kit.proxy import proxy_to
from tests.kit.serving import hang_up, serving


@asynccontextmanager
async def proxying() -> AsyncGenerator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with proxy_to(f"mysql://app@127.0.0.1:{server.getsockname()[1]}/app") as proxy:
            yield urlsplit(proxy.url).port or 0


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("kind", ["proxy", "server"])
async def test_a_server_that_stops_closes_a_connection_that_just_arrived(kind: str, turns: int) -> None:
    gc.collect()  # what earlier tests left is not reported here
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with proxying() if kind == "proxy" else serving(hang_up) as port:
            client = socket.create_connection(("127.0.0.1", port))
            for _ in range(turns):  # of the event loop, each with the next step of taking the connection
                await asyncio.sleep(0)
        client.close()
        gc.collect()
    assert [str(each.message) for each in warned] == []


async def test_a_report_that_is_read_during_a_check_ends_the_wait() -> None:
    reading, writing = os.pipe()
    worker, checks = Worker(cast(Any, None), reading), list[int]()

    def holds() -> bool:
        is_reported = bool(worker.of("came"))
        if not checks:  # the report arrives after the check, and before the worker is asked whether it has ended
            os.write(writing, b'{"what": "came"}\n')
        checks.append(1)
        return is_reported

    async with asyncio.timeout(30):
        await worker.until_it(holds)
    os.close(writing)
    assert worker.is_gone
