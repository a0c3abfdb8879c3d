"""Ports for the servers and proxies of tests, which start listening some time after their port is chosen.

A port that the system chooses is one of those that it gives to outgoing connections, so any connection of the machine
can take it until the server listens. These ports lie below, and no other test process reserves the same one.
"""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from io import TextIOWrapper
from pathlib import Path

LOCKS = Path(tempfile.gettempdir()) / "outboxio-test-ports"
NUMBER = 12_000
USUAL = 32_768
"""The first port of outgoing connections on Linux; elsewhere it is higher."""

_reserved: list[TextIOWrapper] = []
"""The locked files, one for each port, which the system unlocks when this process ends."""


def free_port() -> int:
    """A free port, reserved until this process ends."""
    return next(port for port in _candidates() if _is_free(port) and _reserve(port))


def _candidates() -> Iterator[int]:
    first = _first_outgoing()
    return iter(random.SystemRandom().sample(range(first - NUMBER, first), NUMBER))


@cache
def _first_outgoing() -> int:
    """The first port of the range that the system gives to outgoing connections."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return USUAL
    return first if first > NUMBER + 1024 else USUAL  # if all ports are for outgoing connections, any free port must do


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _reserve(port: int) -> bool:
    LOCKS.mkdir(exist_ok=True)
    file = (LOCKS / str(port)).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    _reserved.append(file)
    return True
