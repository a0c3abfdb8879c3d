"""Verifies the database behind the caller's connection: ``record`` must not write events to a different database.

An identity consists of values that are the same through every proxy and address, and differ between databases; each
dialect chooses them. Rejecting a correct connection would be worse than accepting a wrong one, so a connection whose
identity is unknown is accepted. Before a rejection the shard's identity is read again, because its server may have
restarted, or a standby may have replaced it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any
from weakref import WeakSet

from msgspec import Struct

from outboxio.errors import WrongDatabase
from outboxio.support.log import log_of

logger = log_of(__name__)

QUERY_TIMEOUT = 3.0  # seconds, during which the caller's open transaction waits
RECHECK_INTERVAL = 60.0  # seconds until the shard's identity is read again after a failure


Kin = tuple[Hashable, Hashable]
"""An id that a server shares with its standbys (``None`` without the right to read it), and a database."""


async def _no_kin() -> None:
    return None


class Identity(Struct, frozen=True):
    """The identity of a database, and its name for errors.

    Connections with equal keys lead to the same database. If the keys differ, the database is still the same if ``kin``
    is equal. ``kin`` takes a round trip and is read only if the keys differ.
    """

    key: Hashable
    name: str
    kin: Callable[[], Awaitable[Kin | None]] = _no_kin


class DatabaseVerifier:
    """Verifies that callers' connections lead to the shard's database. Each connection is verified once."""

    def __init__(self, shard: str, own: Callable[[], Awaitable[tuple[Identity, Kin | None]]]) -> None:
        """``own`` reads the identity and kin of the shard's database over a new connection."""
        self._shard = shard
        self._read_own = own
        self._own: tuple[Identity, Kin | None] | None = None
        self._tried_at = float("-inf")
        self._known: WeakSet[Any] = WeakSet()

    async def require(self, connection: Any, identify: Callable[[], Awaitable[Identity]]) -> None:
        """Raise :class:`WrongDatabase` if the driver's connection leads to a different database."""
        if connection in self._known:
            return
        found = await identify()
        own = self._own
        if own is None or own[0].key != found.key:
            own = self._own = await self._read()
        if own is None:
            return  # unknown: the connection is verified at its next use
        if own[0].key != found.key and not _are_same(await found.kin(), own[1]):
            raise WrongDatabase(self._shard, found.name, own[0].name)
        self._known.add(connection)

    async def _read(self) -> tuple[Identity, Kin | None] | None:
        """Read the shard's identity; after a failure not again for ``RECHECK_INTERVAL`` seconds."""
        now = asyncio.get_running_loop().time()
        if self._own is None and now - self._tried_at < RECHECK_INTERVAL:
            return None
        self._tried_at = now
        try:
            async with asyncio.timeout(QUERY_TIMEOUT):
                return await self._read_own()
        except Exception as error:
            logger.debug("shard %s: cannot identify the database: %r", self._shard, error, shard=self._shard)
            return None


def _are_same(found: Kin | None, own: Kin | None) -> bool:
    if found is None or own is None:
        return False
    return found[1] == own[1] and (found[0] == own[0] or None in (found[0], own[0]))
