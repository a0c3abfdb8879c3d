"""Which connections the watch drops and which it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from outboxio.storage.connections import watch as watch_module
from outboxio.storage.connections.watch import ServerSession, Sessions, Watch
from tests.kit.app import eventually

pytestmark = pytest.mark.virtual_time

SERVER, ANOTHER = "one server", "another server"
LONG = 60.0


class Connection:
    """A fake connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: object | None = None
        """What the connection waits for."""


class Scene:
    """A watch over some connections, and a server with scripted answers."""

    def __init__(self, number: int = 1, *, query_timeout: float = LONG) -> None:
        self.connections = [Connection(each) for each in range(number)]
        self.used = list(self.connections)
        self.idle: dict[int, float | None] = dict.fromkeys(range(number), LONG)
        self.server = SERVER
        self.queries = 0
        self.ended: dict[int, str] = {}
        self.is_silent = self.refuses = self.is_shared = False
        self.during_query = lambda: None
        self.watch = Watch(
            "the scene", used=lambda: self.used, waits_for=lambda connection: connection.answer, query=self._query,
            query_timeout=query_timeout, end=self._end,
        )  # fmt: skip
        for connection in self.connections:
            self.watch.register(connection, ServerSession(SERVER, connection.number))

    async def _query(self, numbers: Sequence[int]) -> Sessions | None:
        self.queries += 1
        await asyncio.sleep(LONG if self.is_silent else 0)
        self.during_query()
        if self.refuses:
            raise ConnectionRefusedError
        return None if self.is_shared else Sessions(self.server, {n: self.idle[n] for n in numbers if n in self.idle})

    def _end(self, connection: Connection, why: str) -> None:
        self.used.remove(connection)
        self.ended[connection.number] = why

    async def queried(self, times: int = 3) -> None:
        """Wait until the server was queried this many times."""
        await eventually(lambda: self.queries >= times, timeout=10)
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("CHECK_INTERVAL", 0.01),
        ("PATIENCE", 0.05),
        ("SUSPECT_PATIENCE", 0.02),
        ("RECHECK_INTERVAL", 0.02),
    ):
        monkeypatch.setattr(watch_module, name, seconds)


async def test_a_connection_with_an_idle_session_is_dropped() -> None:
    scene = Scene()
    scene.connections[0].answer = object()
    scene.watch.begin()

    await eventually(lambda: scene.ended, timeout=10)

    assert "no response" in scene.ended[0]
    assert "its server session is idle" in scene.ended[0]


async def test_a_slow_statement_on_an_active_session_is_kept() -> None:
    scene = Scene()
    scene.connections[0].answer, scene.idle[0] = object(), None
    scene.watch.begin()

    await scene.queried()

    assert scene.ended == {}
    await scene.watch.close()


async def test_a_session_that_has_just_become_idle_is_kept() -> None:
    scene = Scene()
    scene.connections[0].answer, scene.idle[0] = object(), watch_module.IDLE_FOR / 2
    scene.watch.begin()

    await scene.queried()

    assert scene.ended == {}
    await scene.watch.close()


async def test_the_server_is_not_queried_without_a_waiting_connection() -> None:
    scene = Scene()
    scene.watch.begin()
    await asyncio.sleep(0.2)

    assert (scene.queries, scene.ended) == (0, {})
    await scene.watch.close()


async def test_the_server_is_not_queried_while_responses_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "PATIENCE", 0.5)
    scene = Scene()
    scene.watch.begin()
    for _ in range(70):
        scene.connections[0].answer = object()
        await asyncio.sleep(0.01)

    assert (scene.queries, scene.ended) == (0, {})
    await scene.watch.close()


async def test_a_response_during_the_query_saves_the_connection() -> None:
    scene = Scene()
    scene.connections[0].answer = object()
    scene.during_query = lambda: setattr(scene.connections[0], "answer", object())
    scene.watch.begin()

    await scene.queried()

    assert scene.ended == {}
    await scene.watch.close()


async def test_a_connection_whose_session_is_gone_is_dropped() -> None:
    scene = Scene(2)
    scene.connections[0].answer, scene.idle[0] = object(), None
    del scene.idle[1]
    scene.watch.begin()

    await eventually(lambda: scene.ended, timeout=10)

    assert scene.ended == {1: "its server session no longer exists"}
    await scene.watch.close()


async def test_sessions_of_another_server_are_ignored() -> None:
    """Behind a load balancer, a new connection may lead to a different server with the same session ids."""
    scene = Scene(2)
    scene.connections[0].answer, scene.server = object(), ANOTHER
    del scene.idle[1]
    scene.watch.begin()

    await scene.queried()

    assert scene.ended == {}
    await scene.watch.close()


async def test_session_ids_behind_a_sharing_proxy_are_ignored() -> None:
    scene = Scene()
    scene.connections[0].answer, scene.is_shared = object(), True
    scene.watch.begin()

    await scene.queried()

    assert scene.ended == {}
    await scene.watch.close()


async def test_an_unreachable_server_ends_waiting_connections() -> None:
    scene = Scene(2, query_timeout=0.05)
    scene.connections[0].answer, scene.is_silent = object(), True
    scene.watch.begin()

    await eventually(lambda: scene.ended, timeout=10)

    assert scene.queries == watch_module.MAX_TIMEOUTS
    assert list(scene.ended) == [0]
    assert "2 new connections were not answered" in scene.ended[0]
    await scene.watch.close()


async def test_a_single_query_timeout_is_ignored() -> None:
    scene = Scene(query_timeout=0.05)
    scene.connections[0].answer, scene.idle[0], scene.is_silent = object(), None, True
    scene.watch.begin()

    await scene.queried(1)
    scene.is_silent = False
    await scene.queried(4)

    assert scene.ended == {}
    await scene.watch.close()


async def test_a_server_that_refuses_new_connections_is_reachable() -> None:
    scene = Scene()
    scene.connections[0].answer, scene.refuses = object(), True
    scene.watch.begin()

    await scene.queried()

    assert scene.ended == {}
    await scene.watch.close()


async def test_refused_queries_are_not_repeated_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have too many connections already."""
    monkeypatch.setattr(watch_module, "RECHECK_INTERVAL", LONG)
    scene = Scene()
    scene.connections[0].answer, scene.refuses = object(), True
    scene.watch.begin()

    await scene.queried(1)
    await asyncio.sleep(0.2)

    assert scene.queries == 1
    await scene.watch.close()


async def test_the_timer_runs_only_while_connections_are_in_use() -> None:
    scene = Scene()
    scene.watch.begin()
    scene.used.clear()
    await eventually(lambda: scene.watch._timer is None, timeout=10)

    scene.used.append(scene.connections[0])
    scene.connections[0].answer = object()
    scene.watch.begin()
    await eventually(lambda: scene.ended, timeout=10)


async def test_close_ends_a_running_query() -> None:
    scene = Scene()
    scene.connections[0].answer, scene.is_silent = object(), True
    scene.watch.begin()
    await scene.queried(1)
    before = len(asyncio.all_tasks())

    await scene.watch.close()

    assert len(asyncio.all_tasks()) == before - 1
    assert scene.watch._timer is None


def test_a_new_event_loop_resets_the_watch() -> None:
    scene = Scene()

    async def wait_in_vain() -> None:
        scene.used[:] = scene.connections
        scene.connections[0].answer = object()
        scene.watch.begin()
        await eventually(lambda: scene.ended, timeout=10)
        scene.ended.clear()
        scene.used[:] = scene.connections  # so that the timer is still running

    asyncio.run(wait_in_vain())
    asyncio.run(wait_in_vain())
