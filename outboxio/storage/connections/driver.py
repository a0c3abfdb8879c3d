"""The driver functions that pools, watches and loop connections share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from msgspec import Struct

from outboxio.storage.connections.watch import Sessions
from outboxio.support import machine
from outboxio.support.clock import steady_now


class PoolCalls(Struct, frozen=True):
    """The functions of a driver for one connection."""

    is_usable: Callable[[Any], bool]
    """True if the connection is open and has no open transaction."""
    close: Callable[[Any], Awaitable[None]]
    """Close the connection cleanly."""
    drop: Callable[[Any], None]
    """Close the connection immediately, without notifying the server."""


class ServerCalls(PoolCalls, frozen=True):
    """The functions for a connection, and those that read server sessions."""

    waits_for: Callable[[Any], Hashable | None]
    """A token for the response that a connection waits for; ``None`` if no statement is running."""
    sessions_of: Callable[[Any, Sequence[int]], Awaitable[Sessions | None]]
    """The state of the server sessions with these ids; ``None`` if a proxy shares server sessions."""


# --- the time limits of a database, and the keep-alive of its sockets -----------------------------


CLOSE_TIMEOUT = 5.0  # seconds to release or close a connection

# A machine that has lost power responds neither to statements nor to keep-alive probes. The operating system closes a
# socket if sent bytes were not acknowledged for UNACKNOWLEDGED. On an idle socket it sends a probe after IDLE seconds,
# which also prevents a load balancer from closing the connection.
IDLE = 10  # seconds
KEEPALIVE_INTERVAL = 5  # seconds
KEEPALIVE_PROBES = 3
UNACKNOWLEDGED = 20_000  # milliseconds

# By name, because no system has all options. TCP_KEEPALIVE is the name of TCP_KEEPIDLE on macOS.
_OPTIONS = {
    "TCP_KEEPIDLE": IDLE,
    "TCP_KEEPALIVE": IDLE,
    "TCP_KEEPINTVL": KEEPALIVE_INTERVAL,
    "TCP_KEEPCNT": KEEPALIVE_PROBES,
    "TCP_USER_TIMEOUT": UNACKNOWLEDGED,
}


class Limits(Struct, frozen=True):
    """The time limits of one database, in seconds. See the settings of the same names."""

    pool_timeout: float = 30.0
    connect_timeout: float = 10.0
    statement_timeout: float = 60.0
    action_statement_timeout: float = 0.0
    """0: no limit."""


DEFAULT_LIMITS = Limits()


# asyncio receives into a buffer of 256 KiB. For each response, glibc may map memory of that size and return it to the
# system, which can take up to a quarter of the CPU time of an action.
READ_SIZE = 64 * 1024  # bytes


def configure(transport: asyncio.BaseTransport | None) -> None:
    """Use a smaller receive buffer, and let the operating system detect a lost peer within 30 s."""
    if hasattr(transport, "max_size"):  # transports of uvloop reuse their buffer
        vars(transport)["max_size"] = READ_SIZE
    found = None if transport is None else transport.get_extra_info("socket")
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return  # a Unix socket leads to the same machine
    with suppress(OSError):  # the options are not essential, or the server has just closed the connection
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):
                found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --- the heartbeat of the session with the cluster locks -------------------------------------------


class Proof(Struct, frozen=True):
    """A successful heartbeat of the session with the cluster locks, and the database's time within it."""

    sent_at: float
    """By ``machine.monotonic()``, which all threads share."""
    database_now: datetime
    sent: datetime
    received: datetime


async def make_proof(query: Awaitable[datetime]) -> Proof:
    """Read the database's clock. No other function compares it with the clock of this machine."""
    sent_at, sent = machine.monotonic(), steady_now()
    database_now = await query
    return Proof(sent_at, database_now, sent, steady_now())
