"""An application with the dashboard of a busy shop, served over HTTP in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

from outboxio import Outbox
from outboxio.dashboard import Dashboard
from tests.kit.busy import open_shop
from tests.kit.dashboards import patient_pages

T = TypeVar("T")

MOUNT = "/admin/outbox"
PATIENCE = 60.0


class Site:
    """The application. Its event loop runs the outbox as well."""

    def __init__(self, database: str, options: Mapping[str, Any], root_path: str) -> None:
        self._database, self._options, self._root_path = database, options, root_path
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self._error: BaseException | None = None
        self.outbox: Outbox
        self.origin = ""
        """As in ``http://127.0.0.1:8000``."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="site")

    @property
    def url(self) -> str:
        """The address of the overview."""
        return f"{self.origin}{MOUNT}/"

    def run(self, call: Callable[[Outbox], Awaitable[T]]) -> T:
        """Await a call in the event loop of the application."""

        async def called() -> T:
            return await call(self.outbox)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(PATIENCE)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(PATIENCE)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(PATIENCE)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with open_shop(self._database) as self.outbox, self.outbox.running():
                app = FastAPI()
                app.mount(MOUNT, Dashboard(self.outbox, **self._options))
                config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", root_path=self._root_path)
                server = uvicorn.Server(config)
                serving = asyncio.create_task(server.serve())
                while not server.started:  # noqa: ASYNC110  # uvicorn has no event for this
                    await asyncio.sleep(0.01)
                self.origin = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
                self._ready.set()
                await self._end.wait()
                server.should_exit = True
                await serving
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()


@contextmanager
def served(database: str, *, root_path: str = "", **options: Any) -> Iterator[Site]:
    """The application with the dashboard, while the block lasts. ``options``: of ``Dashboard``."""
    site = Site(database, options, root_path)
    with patient_pages():
        site.start()
        try:
            yield site
        finally:
            site.stop()
