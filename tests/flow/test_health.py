"""Probes of real worker processes: an unavailable database, a blocked event loop, SIGTERM, a standby, systemd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outboxio import Action, Event, Outbox, Transaction
from tests.kit.app import Look, eventually
from tests.kit.forked import Forked, fork
from tests.kit.ports import free_port
from tests.kit.proxy import Proxy, proxy_to

ROOT = Path(__file__).parents[2]

# The application of the worker, with shorter limits to make the tests faster. The handler reports progress as files.
SHOP = """
import asyncio, os, time
from pathlib import Path
from outboxio import Event, EventEnvelope, Outbox, Settings
from outboxio.health import facts
from outboxio.loops import blocked_loop, loop as pulse

facts.REACHED_WITHIN = 3.0
pulse.LONGEST_ROUND = 1.0
pulse.SHORTEST = 1.5
blocked_loop.THRESHOLD = 2.5  # a machine may stop the process for a second

class Ordered(Event):
    number: int

outbox = Outbox(os.environ["SHOP_DATABASE"], namespace="shop", settings=Settings(lock_heartbeat="1s"))

@outbox.handler(Ordered, name="ship")
async def ship(envelope: EventEnvelope[Ordered]) -> None:
    Path(f"began-{envelope.event.number}").touch()
    while Path("block").exists():
        time.sleep(0.01)
    while Path("hold").exists():
        await asyncio.sleep(0.01)
    Path(f"done-{envelope.event.number}").touch()
"""


class Ordered(Event):
    number: int


class Order(Action):
    number: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Ordered(self.number), model_id=self.number, model_type="Order")


class Worker:
    """A worker process with health pages."""

    def __init__(self, process: Forked, port: int) -> None:
        self.process = process
        self.port = port
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=httpx.Timeout(5.0))

    async def status(self, page: str, timeout: float = 5.0) -> int | None:
        """The status of a page; ``None`` without a timely response."""
        try:
            return (await self._client.get(page, timeout=timeout)).status_code
        except httpx.TransportError:
            return None

    async def health(self) -> dict[str, Any]:
        notices: dict[str, Any] = (await self._client.get("/health")).json()
        return notices

    async def until(self, page: str, status: int | None, timeout: float = 30.0) -> None:
        async def holds() -> bool:
            return await self.status(page) == status

        await eventually(holds, timeout)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()
        await self._client.aclose()


class Place:
    """The directory of the application, and its database."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        self.database = database
        (directory / "shop.py").write_text(SHOP)

    def path(self, name: str) -> Path:
        return self.directory / name

    def _environ(self, environ: dict[str, str]) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OUTBOXIO_", "NOTIFY_"))}
        return {**inherited, "PYTHONPATH": str(ROOT), "SHOP_DATABASE": self.database, **environ}

    async def _started(self, *arguments: str, **environ: str) -> Forked:
        return await fork(
            *("outboxio.cli", *arguments), folder=self.directory, environ=self._environ(environ), with_stderr=True
        )

    @asynccontextmanager
    async def worker(self, **environ: str) -> AsyncIterator[Worker]:
        """A worker with responding health pages, which does not outlive the block."""
        port = free_port()
        process = await self._started("worker", "shop:outbox", "--health-port", str(port), **environ)
        worker = Worker(process, port)
        try:
            await worker.until("/live", 200)
            yield worker
        finally:
            await worker.end()

    async def outboxio(self, *arguments: str) -> tuple[int | None, str, str]:
        """The exit code of a command, and its output."""
        process = await self._started(*arguments)
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def migrated(url: str) -> AsyncIterator[Outbox]:
    """The application's outbox in this process, without handlers."""
    async with Outbox(url, namespace="shop") as outbox:
        await outbox.migrate()
        yield outbox


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[tuple[Place, Outbox]]:
    place = Place(tmp_path, f"sqlite:///{tmp_path / 'local.db'}")
    async with migrated(place.database) as outbox:
        yield place, outbox


# --- the database ------------------------------------------------------------------------------------


@pytest.mark.above_statements
@pytest.mark.parametrize("how", ["refuses", "is silent"])
async def test_an_unavailable_database_ends_readiness_but_not_liveness(
    server_url: str, tmp_path: Path, how: str
) -> None:
    async with migrated(server_url) as shop, proxy_to(server_url) as proxy:
        place = Place(tmp_path, proxy.url)
        async with place.worker() as worker:
            await worker.until("/ready", 200)
            await (proxy.stop() if how == "refuses" else _silence(proxy))
            lives = Lives(worker)
            await worker.until("/ready", 503)
            health = await worker.health()
            assert set(await lives.end(at_least=40)) == {200}
            assert (health["status"], health["live"], health["ready"]) == ("down", True, False)
            assert any("cannot be reached" in reason for reason in health["reasons"])

            await _back(proxy, how)
            await worker.until("/ready", 200)
            await shop.execute(Order(1))
            await eventually(place.path("done-1").exists)
            await worker.until("/health", 200)


async def _silence(proxy: Proxy) -> None:
    proxy.stall()


async def _back(proxy: Proxy, how: str) -> None:
    if how == "refuses":
        await proxy.start()
    else:
        proxy.resume()


class Lives:
    """Queries the liveness of a worker continuously."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._found: list[int | None] = []
        self._task = asyncio.create_task(self._ask())

    async def end(self, at_least: int) -> list[int | None]:
        """The responses, once there are this many."""
        await eventually(lambda: len(self._found) >= at_least)
        self._task.cancel()
        await asyncio.wait({self._task})
        return self._found

    async def _ask(self) -> None:
        while True:
            self._found.append(await self._worker.status("/live"))
            await asyncio.sleep(0.05)


async def test_an_unreachable_shard_at_startup_keeps_no_worker_from_readiness(
    local: tuple[Place, Outbox],
) -> None:
    place, _ = local
    databases = "{'up': os.environ['SHOP_DATABASE'], 'down': 'postgresql://127.0.0.1:1/x'}"
    place.path("shop.py").write_text(SHOP.replace('os.environ["SHOP_DATABASE"]', databases))

    async with place.worker() as worker:
        await worker.until("/ready", 200)
        health = await worker.health()

    assert (health["status"], health["live"], health["ready"]) == ("degraded", True, True)
    assert health["reasons"] == ["shard 'down' cannot be reached"]
    assert health["shards"]["down"]["reachable"] is False


async def test_missing_tables_end_a_worker_with_a_fix(tmp_path: Path) -> None:
    place = Place(tmp_path, f"sqlite:///{tmp_path / 'empty.db'}")

    code, _, err = await place.outboxio("worker", "shop:outbox", "--health-port", "0")

    assert code == 1
    assert "outboxio migrate" in err


# --- the event loop ----------------------------------------------------------------------------------


async def test_a_worker_with_a_blocked_loop_does_not_respond(
    local: tuple[Place, Outbox],
) -> None:
    place, shop = local
    async with place.worker() as worker:
        await worker.until("/ready", 200)
        place.path("block").touch()
        await shop.execute(Order(1))
        await eventually(place.path("began-1").exists)

        assert await worker.status("/live", timeout=2.0) is None
        code, _, err = await place.outboxio("health", "--port", str(worker.port), "--live", "--timeout", "1s")
        assert code == 3
        assert "no response within" in err

        place.path("block").unlink()
        await worker.until("/live", 200)
        await worker.until("/ready", 200)
        health = await worker.health()

    assert (health["status"], health["live"]) == ("degraded", True)
    assert "the event loop was blocked for" in health["reasons"][0]


# --- several processes, and shutdown ----------------------------------------------------------------------


async def test_a_standby_is_healthy_and_takes_over(local: tuple[Place, Outbox]) -> None:
    place, shop = local
    async with place.worker() as holder:
        await holder.until("/ready", 200)
        await eventually(lambda: _holds(holder, 2))
        async with place.worker() as standby:
            await standby.until("/ready", 200)
            health = await standby.health()
            assert (health["status"], health["live"], health["ready"], health["reasons"]) == ("ok", True, True, [])
            assert health["shards"]["default"]["locks_held"] == []
            assert len(health["shards"]["default"]["locks_lacking"]) == 2

            holder.process.kill()
            await eventually(lambda: _holds(standby, 2))
            await shop.execute(Order(1))
            await eventually(place.path("done-1").exists)


async def _holds(worker: Worker, number: int) -> bool:
    return len((await worker.health())["shards"]["default"]["locks_held"]) == number


@pytest.mark.above_statements
async def test_a_leaving_worker_is_unready_and_stays_alive_until_done(server_url: str, tmp_path: Path) -> None:
    place = Place(tmp_path, server_url)
    async with migrated(server_url) as shop, place.worker() as worker:
        await worker.until("/ready", 200)
        place.path("hold").touch()
        await shop.execute(Order(1))
        await eventually(place.path("began-1").exists)

        worker.process.send_signal(signal.SIGTERM)
        await worker.until("/ready", 503, timeout=5.0)
        health = await worker.health()
        assert (health["live"], health["phase"]) == (True, "leaving")
        assert not place.path("done-1").exists()

        place.path("hold").unlink()
        assert await worker.process.wait() == 0
        assert await Look(server_url).states() == {"SUCCEEDED": 1}


# --- systemd -----------------------------------------------------------------------------------------


@contextmanager
def _service_manager(path: Path) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.setblocking(False)
        yield receiver


async def _next_notification(manager: socket.socket, timeout: float = 20.0) -> str:
    async with asyncio.timeout(timeout):
        return (await asyncio.get_running_loop().sock_recv(manager, 1000)).decode()


async def _silent(manager: socket.socket) -> None:
    """Wait until nothing is sent any more; earlier notifications are read first."""
    while True:
        try:
            await _next_notification(manager, timeout=1.0)
        except TimeoutError:
            return


async def test_systemd_gets_ready_watchdog_and_stopping_notifications(
    local: tuple[Place, Outbox],
) -> None:
    place, shop = local
    with _service_manager(place.path("notify")) as manager:
        environ = {"NOTIFY_SOCKET": str(place.path("notify")), "WATCHDOG_USEC": "600000"}
        async with place.worker(**environ) as worker:
            notices = [await _next_notification(manager)]
            while notices[-1] != "READY=1":
                notices.append(await _next_notification(manager))
            assert set(notices[:-1]) <= {"WATCHDOG=1"}
            assert await _next_notification(manager) == "WATCHDOG=1"

            place.path("block").touch()
            await shop.execute(Order(1))
            await eventually(place.path("began-1").exists)
            await _silent(manager)

            place.path("block").unlink()
            assert await _next_notification(manager) == "WATCHDOG=1"
            worker.process.send_signal(signal.SIGTERM)
            while (state := await _next_notification(manager)) != "STOPPING=1":
                assert state == "WATCHDOG=1"
            assert await worker.process.wait() == 0


# --- the command ---------------------------------------------------------------------------------------


async def test_the_health_command_queries_a_worker_without_importing_the_application(
    local: tuple[Place, Outbox],
) -> None:
    place, _ = local
    async with place.worker() as worker:
        await worker.until("/ready", 200)
        place.path("shop.py").write_text("raise RuntimeError('imported')")
        port = str(worker.port)
        answers = [await place.outboxio("health", "--port", port, *more) for more in ([], ["--live"], ["--ready"])]
        as_json = await place.outboxio("health", "--port", port, "--json", "--max-age", "60s")
    gone = await place.outboxio("health", "--port", port)

    assert [(code, out) for code, out, _ in answers] == [(0, "ok\n"), (0, "live\n"), (0, "ready\n")]
    assert (as_json[0], json.loads(as_json[1])["phase"]) == (0, "running")
    assert (gone[0], "no worker responds on 127.0.0.1" in gone[2]) == (3, True)


async def test_the_health_command_checks_a_database(local: tuple[Place, Outbox], tmp_path: Path) -> None:
    place, _ = local
    well = await place.outboxio("health", "shop:outbox", "--json")
    database = await place.outboxio("health", "--database", place.database, "--namespace", "shop")
    empty = await place.outboxio("health", "--database", f"sqlite:///{tmp_path / 'empty.db'}", "--namespace", "shop")
    down = await place.outboxio("health", "--database", "postgresql://127.0.0.1:1/x", "--namespace", "shop")

    assert (well[0], json.loads(well[1])["status"], json.loads(well[1])["reasons"]) == (0, "ok", [])
    assert database[:2] == (0, "ok\n")
    assert (empty[0], "run outboxio check" in empty[1]) == (1, True)
    assert (down[0], "shard 'default' cannot be reached" in down[1]) == (3, True)
