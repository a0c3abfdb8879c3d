"""The database behind a connection of the application: ``record`` must not write events into a wrong database.

An identity consists of values that are equal through every proxy and address, and differ between databases; the dialect
chooses the values. Refusing a right connection would be worse than accepting a wrong connection. So a connection
without a known identity is accepted. Before a refusal the shard's identity is read again, because its server may have
restarted, or a standby may have replaced the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any
from weakref import WeakSet

from msgspec import Struct

from outboxio.errors import OtherDatabase
from outboxio.support.log import log_of

logger = log_of(__name__)

LONGEST_QUESTION = 3.0  # seconds: the open transaction of the application waits for the answer
ASKED_AGAIN = 60.0  # seconds until the shard's database is asked again after a failure


Kin = tuple[Hashable, Hashable]
"""An id that a server shares with its standbys, ``None`` without the right to read the id; and a database."""


async def _no_kin() -> None:
    return None


class Identity(Struct, frozen=True):
    """The identity of a database, and its name for errors.

    Connections with equal keys lead to the same database. With different keys the database is still the same if ``kin``
    is equal. ``kin`` needs a round trip and is read only for different keys.
    """

    key: Hashable
    name: str
    kin: Callable[[], Awaitable[Kin | None]] = _no_kin


class OwnDatabase:
    """Checks if connections of the application lead to the shard's database. Each connection is checked once."""

    def __init__(self, shard: str, own: Callable[[], Awaitable[tuple[Identity, Kin | None]]]) -> None:
        """``own`` reads the identity and the kin of the shard's database over a new connection."""
        self._shard = shard
        self._ask_own = own
        self._own: tuple[Identity, Kin | None] | None = None
        self._asked_at = float("-inf")
        self._known: WeakSet[Any] = WeakSet()

    async def require(self, connection: Any, identify: Callable[[], Awaitable[Identity]]) -> None:
        """Raise :class:`OtherDatabase` if the driver's connection leads to a different database."""
        if connection in self._known:
            return
        given = await identify()
        own = self._own
        if own is None or own[0].key != given.key:
            own = self._own = await self._ask()
        if own is None:
            return  # unknown: the connection is checked again at its next use
        if own[0].key != given.key and not _are_same(await given.kin(), own[1]):
            raise OtherDatabase(self._shard, given.name, own[0].name)
        self._known.add(connection)

    async def _ask(self) -> tuple[Identity, Kin | None] | None:
        """Read the shard's identity; after a failure not again for ``ASKED_AGAIN`` seconds."""
        now = asyncio.get_running_loop().time()
        if self._own is None and now - self._asked_at < ASKED_AGAIN:
            return None
        self._asked_at = now
        try:
            async with asyncio.timeout(LONGEST_QUESTION):
                return await self._ask_own()
        except Exception as error:
            logger.debug("shard %s cannot say which database it is: %r", self._shard, error, shard=self._shard)
            return None


def _are_same(given: Kin | None, own: Kin | None) -> bool:
    if given is None or own is None:
        return False
    return given[1] == own[1] and (given[0] == own[0] or None in (given[0], own[0]))
