"""The connections of a shard to a server, with a fake driver: which are watched, released and closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outboxio.storage.connections.driver import DEFAULT_LIMITS, ServerCalls
from outboxio.storage.connections.identity import Identity
from outboxio.storage.connections.loop_connection import BaseLoopConnection, LoopSource
from outboxio.storage.connections.pool import Occupancy, PoolAccess
from outboxio.storage.connections.server import ServerDatabase
from outboxio.storage.connections.watch import Sessions


class Wire:
    """Stands for a connection."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.end = ""


class LoopConnection(BaseLoopConnection):
    async def prepare(self, connection: Wire) -> None:
        """No settings."""

    async def restore(self, connection: Wire) -> None:
        """No settings."""

    def is_closed(self, connection: Wire) -> bool:
        return bool(connection.end)

    def drop(self, connection: Wire) -> None:
        connection.end = "dropped"

    def is_read_only(self, error: Exception) -> bool:
        return False


async def hang_up(wire: Wire) -> None:
    wire.end = "goodbye"


def drop(wire: Wire) -> None:
    wire.end = "dropped"


async def sessions_of(wire: Wire, numbers: Sequence[int]) -> Sessions | None:
    if wire.url == "refuses":
        raise ConnectionRefusedError
    return Sessions("server", dict.fromkeys(numbers, 1.0))


DRIVER = ServerCalls(lambda wire: not wire.end, hang_up, drop, lambda wire: None, sessions_of)


class Database(ServerDatabase[LoopConnection]):
    """A database without a dialect."""

    def __init__(self, source: Any, direct_url: str | None = None) -> None:
        self.opened: list[Wire] = []
        self.given_back: list[Wire] = []
        super().__init__("main", source, direct_url, DRIVER, guard=None, limits=DEFAULT_LIMITS)

    @staticmethod
    def _address_of(url: str | None) -> str:
        return url or "the user-supplied pool"

    def _access_to(self, pool: Any) -> PoolAccess:
        async def release(wire: Wire) -> None:
            self.given_back.append(wire)

        return PoolAccess(self._connect, release, lambda: True, lambda: Occupancy(0, 1))

    async def _connect(self) -> Wire:
        return await self._connect_for_watch(self._direct_url or "")

    async def _connect_for_actions(self) -> Wire:
        return await self._connect_for_watch(self._url or "")

    async def _connect_for_watch(self, url: str) -> Wire:
        self.opened.append(Wire(url))
        return self.opened[-1]

    async def _check_out(self) -> Any:
        raise NotImplementedError

    async def _identity_of(self, connection: Wire) -> Identity:
        raise NotImplementedError

    async def _session_number(self, connection: Wire, *, in_transaction: bool = False) -> int:
        raise NotImplementedError

    async def _explain(self, session: Any, error: BaseException) -> Exception | None:
        raise NotImplementedError

    def _session_of_unit(self, unit: Any) -> Any:
        raise NotImplementedError

    def _lock_on(self, session: LoopConnection, owner: str, channel: str | None, heartbeat: float) -> Any:
        raise NotImplementedError

    def _keys_on(self, session: LoopConnection, owner: str, heartbeat: float) -> Any:
        raise NotImplementedError

    def _make_loop(self, source: LoopSource, *, keeps: bool, writes: bool) -> LoopConnection:
        return LoopConnection(source, keeps=keeps, writes=writes)


def test_connections_to_one_url_share_a_watch() -> None:
    database = Database("db")

    assert database._connections.watches == [database._watch]
    assert database._loop_watch is database._watch


def test_proxied_and_direct_connections_have_separate_watches() -> None:
    database = Database("proxy", "db")

    assert database._connections.watches == [database._watch, database._loop_watch]
    assert database._loop_watch is not database._watch


def test_a_user_supplied_pool_has_no_watch() -> None:
    database = Database(object())

    assert (database._watch, database._loop_watch, database._connections.watches) == (None, None, [])


@pytest.mark.parametrize(("url", "end"), [("db", "goodbye"), ("refuses", "dropped")])
async def test_the_connection_of_a_session_query_is_closed(url: str, end: str) -> None:
    database = Database(url)

    if url == "refuses":
        with pytest.raises(ConnectionRefusedError):
            await database._query_sessions(url, [7])
    else:
        assert await database._query_sessions(url, [7]) == Sessions("server", {7: 1.0})

    assert [wire.end for wire in database.opened] == [end]


async def test_close_ends_all_connections() -> None:
    database = Database("db")
    for loop in (database._admin, database._fanout, database._find, database._settle):
        await loop.ready()
    database._action_pool.release(await database._action_pool.acquire())

    await database.close()

    assert [wire.end for wire in database.opened] == ["goodbye"] * 5


async def test_a_loop_returns_its_connection_to_the_user_supplied_pool() -> None:
    database = Database(object())
    await database._fanout.ready()

    await database.release_loops()

    assert database.given_back == database.opened
    assert database.opened[0].end == ""
