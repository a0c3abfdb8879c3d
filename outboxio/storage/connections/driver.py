"""The functions of a database driver that pools, watches and loop connections share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

from msgspec import Struct

from outboxio.storage.connections.watch import Sessions


class PoolCalls(Struct, frozen=True):
    """How a driver judges and ends one connection."""

    is_usable: Callable[[Any], bool]
    """True if the connection is open and has no transaction open."""
    hang_up: Callable[[Any], Awaitable[None]]
    """Close the connection with a goodbye to the server."""
    drop: Callable[[Any], None]
    """Close the connection at once, without a goodbye."""


class ServerCalls(PoolCalls, frozen=True):
    """The calls of a pool, and the questions about server sessions."""

    waits_for: Callable[[Any], Hashable | None]
    """The answer for which a connection waits; ``None`` if no statement is under way."""
    sessions_of: Callable[[Any, Sequence[int]], Awaitable[Sessions | None]]
    """The state of the server sessions with these numbers; ``None`` if a proxy shares server sessions."""
