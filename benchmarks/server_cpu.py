"""Measure the processor time of a database server on this machine, including all its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import asyncpg

from tests.kit.app import Look

_PROC = Path("/proc")
_TICK = os.sysconf("SC_CLK_TCK")
_PROGRAMS = (b"postgres", b"mysqld", b"mariadbd")


class ServerCpu:
    """Reads the processor time of a server; ``pid`` is the server's first process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @classmethod
    async def of(cls, url: str) -> ServerCpu | None:
        """Return the server of a URL, or None if its processes are not visible from here."""
        pid = await _first_process(Look(url))
        return None if pid is None or not _is_server(pid) else cls(pid)

    def seconds(self) -> float:
        """Return the total processor time of the server's processes, including those that have ended."""
        ticks = 0
        for pid in (self._pid, *_children(self._pid)):
            with suppress(OSError):  # the process has just ended; its time now counts for its parent
                user, system, of_ended, of_ended_in_system = map(int, _stat(pid)[11:15])
                ticks += user + system + (of_ended + of_ended_in_system if pid == self._pid else 0)
        return ticks / _TICK


async def _first_process(look: Look) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        if look.driver == "asyncpg":
            connection = await asyncpg.connect(look.url)
            try:
                session = await connection.fetchval("SELECT pg_backend_pid()")
                return _parent(session) if _is_server(session) else None
            finally:
                await connection.close()
        if look.driver == "aiomysql":
            [where] = await look.fetch("SELECT @@datadir AS folder, @@pid_file AS file")
            return int((Path(where["folder"]) / where["file"]).read_text())
    return None


def _children(parent: int) -> Iterator[int]:
    for name in os.listdir(_PROC):
        if name.isdecimal():
            with suppress(OSError):
                if _parent(int(name)) == parent:
                    yield int(name)


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name, which may contain spaces."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _is_server(pid: int) -> bool:
    """Return False if the PID belongs to a process on another machine or in a container.

    The program may have been started by its loader, so the whole command line counts.
    """
    command = (_PROC / str(pid) / "cmdline").read_bytes()
    return any(program in command for program in _PROGRAMS)
