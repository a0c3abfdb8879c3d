"""Cluster locks on SQLite: locked files beside the database, and fencing terms inside it.

A lock is a file of its own in ``<database>.locks/``, held by ``flock`` for as long as the file is open: when the
holder's process dies, however it dies, the system closes the file and the next try of a standby succeeds. It is never
the database file itself: closing any descriptor of that one would drop SQLite's own locks on it. Two descriptors of
one file exclude each other inside a process as well.

A database in memory belongs to one process, so its locks are names in a set.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from io import FileIO
from typing import Protocol

import msgspec

from outboxio.clock import utc_now
from outboxio.errors import DatabaseUnavailable
from outboxio.names import LockName
from outboxio.storage.protocols import Acquired
from outboxio.storage.sqlite.connection import Connections, fetch_value
from outboxio.storage.sqlite.values import as_json, as_text

RAISE_TERMS = """
INSERT INTO eventlog_leases (name, term, owner, acquired_date, released_term)
SELECT value, 1, :owner, :now, 0 FROM json_each(:names) WHERE TRUE
ON CONFLICT (name) DO UPDATE SET term = term + 1, owner = excluded.owner, acquired_date = excluded.acquired_date
"""

TERMS = """
SELECT json_group_object(name, json_object('term', term, 'released_term', released_term)) FROM eventlog_leases
WHERE name IN (SELECT value FROM json_each(:names))
"""

GIVE_BACK = """
UPDATE eventlog_leases SET released_term = term WHERE name IN (SELECT value FROM json_each(:names)) AND owner = :owner
"""


class Held(Protocol):
    """One lock that was taken."""

    @property
    def is_ours(self) -> bool:
        """Whether it still excludes others."""
        ...

    def release(self) -> None: ...


class Locks(Protocol):
    """Where the locks of one database are."""

    def take(self, name: LockName) -> Held | None:
        """The lock, or ``None`` if somebody has it."""
        ...


class SqliteClusterLock:
    def __init__(self, connections: Connections, locks: Locks, shard: str, owner: str) -> None:
        self._connections = connections
        self._locks = locks
        self._shard = shard
        self._owner = owner[:255]
        self._held: dict[LockName, Held] = {}

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, Acquired]:
        try:
            taken = [name for name in names if self._take(name)]
            terms = await self._raise_terms(taken)
        except BaseException:
            # Nobody knows by now what was taken, and a standby may be luckier with the database.
            self._release_all()
            raise
        return {name: terms[name.lease] for name in taken}

    async def try_probe(self, name: LockName) -> bool:
        return self._take(name)

    async def heartbeat(self) -> datetime:
        if not all(lock.is_ours for lock in self._held.values()):
            self._release_all()
            raise DatabaseUnavailable(self._shard, "its lock files", "somebody has removed or replaced them")
        return utc_now()  # the clock of everybody who can open the file

    async def release(self, names: Sequence[LockName]) -> None:
        held = [name for name in names if name in self._held]
        try:
            if held:
                leases = as_json(name.lease for name in held)
                await self._connections.write(GIVE_BACK, {"names": leases, "owner": self._owner})
        finally:
            for name in held:
                if (lock := self._held.pop(name, None)) is not None:
                    lock.release()

    async def listen(self, heard: Callable[[str], None]) -> None:
        """Nothing is ever heard: SQLite cannot wake other processes, so they poll."""

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Nothing is ever lost before the process ends."""

    async def close(self) -> None:
        self._release_all()

    def _take(self, name: LockName) -> bool:
        try:
            lock = self._locks.take(name)
        except OSError as error:
            raise DatabaseUnavailable(self._shard, str(error.filename), f"cannot lock: {error.strerror}") from error
        if lock is not None:
            self._held[name] = lock
        return lock is not None

    def _release_all(self) -> None:
        held, self._held = self._held, {}
        for lock in held.values():
            lock.release()

    async def _raise_terms(self, names: Sequence[LockName]) -> Mapping[str, Acquired]:
        if not names:
            return {}
        parameters = {"names": as_json(name.lease for name in names), "owner": self._owner, "now": as_text(utc_now())}

        def raise_and_read(connection: sqlite3.Connection) -> str:
            connection.execute(RAISE_TERMS, parameters)
            return str(fetch_value(connection, TERMS, parameters))

        return msgspec.json.decode(await self._connections.transact(raise_and_read), type=dict[str, Acquired])


# --- beside a file -------------------------------------------------------------------------------


class FileLocks:
    """Lock files in a folder beside the database. They stay there: removing one would let two processes hold it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def take(self, name: LockName) -> Held | None:
        # By whatever links the database is reached, its locks are the same.
        folder = os.path.realpath(self._path) + ".locks"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        lock = FileLock(os.path.join(folder, name.text))
        if lock.is_ours:
            return lock
        lock.release()
        return None


class FileLock:
    """One lock file, held if it was free."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = FileIO(path, "a")
        _open_files.add(self._file)
        try:
            self._locked = _flock(self._file)
        except BaseException:
            self._file.close()
            raise

    @property
    def is_ours(self) -> bool:
        """Whether we hold it, and it is still the file that others would find."""
        try:
            return self._locked and os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        self._file.close()


def _flock(file: FileIO) -> bool:
    import fcntl  # not on Windows, where only databases in memory have locks

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_open_files: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child shares our open files, and would hold our locks after our death. Its closing them frees none."""
    for file in list(_open_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# --- in memory -----------------------------------------------------------------------------------


class MemoryLocks:
    """The locks of one database in memory."""

    def __init__(self) -> None:
        self._taken: set[LockName] = set()

    def take(self, name: LockName) -> Held | None:
        if name in self._taken:
            return None
        self._taken.add(name)
        return MemoryLock(self._taken, name)


class MemoryLock:
    """One name in the set."""

    is_ours = True

    def __init__(self, taken: set[LockName], name: LockName) -> None:
        self._taken = taken
        self._name = name

    def release(self) -> None:
        self._taken.discard(self._name)
