"""The functions of a database driver that pools, watches and loop connections share."""

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


# --- the time limits of a database, and the keep-alive of its sockets -----------------------------


FAREWELL_TIMEOUT = 5.0  # seconds to give back or to close a connection

# A machine without power answers no packet: no statement, and no keep-alive probe of the operating system. The
# operating system closes a socket if sent bytes were not acknowledged for UNACKNOWLEDGED. On a silent socket it sends a
# probe after IDLE seconds, which also shows to a balancer in between that the connection is in use.
IDLE = 10  # seconds
BETWEEN_QUESTIONS = 5  # seconds
QUESTIONS = 3
UNACKNOWLEDGED = 20_000  # milliseconds

# Options by name, because no system has all options. TCP_KEEPALIVE is the name of TCP_KEEPIDLE on macOS.
_OPTIONS = {
    "TCP_KEEPIDLE": IDLE,
    "TCP_KEEPALIVE": IDLE,
    "TCP_KEEPINTVL": BETWEEN_QUESTIONS,
    "TCP_KEEPCNT": QUESTIONS,
    "TCP_USER_TIMEOUT": UNACKNOWLEDGED,
}


class Limits(Struct, frozen=True):
    """The time limits of one database, in seconds. The settings of the same names describe each limit."""

    pool_timeout: float = 30.0
    connect_timeout: float = 10.0
    statement_timeout: float = 60.0
    action_statement_timeout: float = 0.0
    """0: no limit."""


DEFAULT_LIMITS = Limits()


# asyncio receives into a buffer of 256 KiB. For a buffer of that size glibc often maps pages and returns them to the
# system, for each answer of the server: up to a quarter of the CPU of an action, by the layout of the heap.
READ_SIZE = 64 * 1024  # bytes


def configure(transport: asyncio.BaseTransport | None) -> None:
    """Receive in smaller pieces, and let the operating system notice within 30 s that the other machine is gone."""
    if hasattr(transport, "max_size"):  # not the transports of uvloop, which keep their buffer
        vars(transport)["max_size"] = READ_SIZE
    found = None if transport is None else transport.get_extra_info("socket")
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return  # a Unix socket leads to the same machine
    with suppress(OSError):  # the connection works without the options, or the server has just closed it
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):
                found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# --- A proof that the session with the cluster locks lives ----------------------------------------
#
# A proof that the session with the cluster locks lives, with the time of the database's clock.


class Proof(Struct, frozen=True):
    """An answered heartbeat: the sending time, and the database's time between two times of this process."""

    sent_at: float
    """By ``machine.monotonic()``, which all threads share."""
    database_now: datetime
    asked: datetime
    answered: datetime


async def measured(asking: Awaitable[datetime]) -> Proof:
    """Ask the database for the time. Only this function compares this machine's clock with the database's clock."""
    sent_at, asked = machine.monotonic(), steady_now()
    database_now = await asking
    return Proof(sent_at, database_now, asked, steady_now())
