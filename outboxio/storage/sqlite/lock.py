"""Cluster locks on SQLite: locked files beside the database, and fencing terms inside it.

A lock is a file in ``<database>.locks/``, held with ``flock`` as long as the file is open. When the holder's process
dies, for any reason, the operating system closes the file, and the next attempt of a standby succeeds. The database
file itself is never locked, because closing any of its descriptors would release SQLite's locks. Two descriptors of a
lock file exclude each other even within a process.

A database in memory belongs to a single process, so the locks are names in a set.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from io import FileIO
from typing import Protocol

import msgspec

from outboxio.errors import DatabaseUnavailable
from outboxio.model.lock_name import LockName
from outboxio.storage.connections.driver import Proof, make_proof
from outboxio.storage.protocols import LockGrant
from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_json, as_text
from outboxio.support.clock import utc_now
from outboxio.support.machine import in_forked_children

RAISE_TERMS = """
INSERT INTO eventlog_leases (name, term, owner, acquired_date, released_term)
SELECT value, 1, :owner, :now, 0 FROM json_each(:names) WHERE TRUE
ON CONFLICT (name) DO UPDATE SET term = term + 1, owner = excluded.owner, acquired_date = excluded.acquired_date
"""

TERMS = """
SELECT json_group_object(name, json_object('term', term, 'released_term', released_term)) FROM eventlog_leases
WHERE name IN (SELECT value FROM json_each(:names))
"""

RECORD_RELEASE = """
UPDATE eventlog_leases SET released_term = term WHERE name IN (SELECT value FROM json_each(:names)) AND owner = :owner
"""


class Held(Protocol):
    """A lock that this process has taken."""

    @property
    def is_ours(self) -> bool:
        """True if the lock still excludes all other holders."""
        ...

    def release(self) -> None: ...

    def end(self) -> None:
        """Release the lock and remove its file, because the name is not expected to be used again soon."""
        ...


class Locks(Protocol):
    """The locks of a database."""

    def take(self, name: LockName) -> Held | None:
        """Take a lock; ``None`` if it is held."""
        ...

    def reset(self) -> None:
        """Release all locks of a closed event loop, whose tasks can no longer release them."""
        ...


class SqliteClusterLock:
    proof = None

    def __init__(self, connections: Connections, locks: Locks, shard: str, owner: str) -> None:
        self._connections = connections
        self._locks = locks
        self._shard = shard
        self._owner = owner[:255]
        self._held: dict[LockName, Held] = {}

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        try:
            taken = [name for name in names if self._take(name)]
            terms = await self._raise_terms(taken)
        except BaseException:
            # The terms are unknown, and a standby may be able to reach the database.
            self._release_all()
            raise
        return {name: terms[name.lease] for name in taken}

    async def try_probe(self, name: LockName) -> bool:
        return self._take(name)

    async def heartbeat(self) -> Proof:
        return await make_proof(self._prove())

    async def _prove(self) -> datetime:
        if not all(lock.is_ours for lock in self._held.values()):
            self._release_all()
            raise DatabaseUnavailable(self._shard, "its lock files", "the files were removed or replaced")
        return utc_now()  # all processes that can open the file have the same clock

    async def release(self, names: Sequence[LockName]) -> None:
        held = [name for name in names if name in self._held]
        try:
            if held:
                leases = as_json(name.lease for name in held)
                await self._connections.write(RECORD_RELEASE, {"names": leases, "owner": self._owner})
        except BaseException:
            # After an error, the lock manager assumes that no lock is held, and takes all of them again.
            self._release_all()
            raise
        for name in held:
            if (lock := self._held.pop(name, None)) is not None:
                lock.release()

    async def listen(self, on_wake: Callable[[str], None]) -> None:
        """Never call ``on_wake``: SQLite cannot wake processes, so they poll."""

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Never call ``callback``: a lock is lost only when the process ends."""

    async def close(self) -> None:
        self._release_all()

    def _take(self, name: LockName) -> bool:
        self._connections.guard.enter()  # before taking the lock: a new event loop starts without locks
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

    async def _raise_terms(self, names: Sequence[LockName]) -> Mapping[str, LockGrant]:
        if not names:
            return {}
        parameters = {"names": as_json(name.lease for name in names), "owner": self._owner, "now": as_text(utc_now())}

        def raise_and_read(connection: sqlite3.Connection) -> str:
            connection.execute(RAISE_TERMS, parameters)
            return str(fetch_value(connection, TERMS, parameters))

        return msgspec.json.decode(await self._connections.transact(raise_and_read), type=dict[str, LockGrant])


# --- next to a file ------------------------------------------------------------------------------


class FileLocks:
    """Lock files in a directory beside the database. The files of cluster locks are kept."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._taken: weakref.WeakSet[FileLock] = weakref.WeakSet()

    def reset(self) -> None:
        for lock in list(self._taken):
            lock.release()

    def take(self, name: LockName) -> Held | None:
        # All symbolic links to the database share the same locks.
        directory = os.path.realpath(self._path) + ".locks"
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        _require_trusted_owner(directory, directory.removesuffix(".locks"))
        lock = FileLock(os.path.join(directory, name.text))
        if lock.is_ours:
            self._taken.add(lock)
            return lock
        lock.release()
        return None


class FileLock:
    """A lock file, held if the file was free."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = FileIO(path, "a", opener=_open_without_links)
        _open_files.add(self._file)
        try:
            self._locked = _flock(self._file)
        except BaseException:
            self._file.close()
            raise

    @property
    def is_ours(self) -> bool:
        """True if this object holds the lock, and the path still leads to the same file."""
        try:
            return self._locked and os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        self._file.close()

    def end(self) -> None:
        # Remove the file while the lock is held: a process that has opened it will find that the path has changed.
        if self.is_ours:
            os.unlink(self._path)
        self.release()


def _require_trusted_owner(directory: str, database: str) -> None:
    """Reject a lock directory of another user, who may have planted symbolic links to create files elsewhere.

    Trusted owners are this user, the owner of the database and root, who have access to the database anyway.
    """
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is a symbolic link or not a directory; remove it", directory)
    trusted = {os.geteuid(), 0}
    with contextlib.suppress(FileNotFoundError):
        trusted.add(os.stat(database).st_uid)
    if found.st_uid not in trusted:
        reason = f"it belongs to user {found.st_uid}, who is neither this user nor the owner of {database}; remove it"
        raise PermissionError(errno.EPERM, reason, directory)


def _open_without_links(path: str, flags: int) -> int:
    """Open or create a lock file. Never follow a symbolic link, and never block on a named pipe."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link; remove it", path) from error
        raise


def _flock(file: FileIO) -> bool:
    import fcntl  # not on Windows, where only databases in memory have locks

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_open_files: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the files in a forked child, which would otherwise hold the locks after this process dies.

    Closing them in the child releases no lock, because the parent still has them open.
    """
    for file in list(_open_files):
        file.close()


in_forked_children(_close_in_child)


# --- in memory -----------------------------------------------------------------------------------


class MemoryLocks:
    """The locks of a database in memory."""

    def __init__(self) -> None:
        self._taken: set[LockName] = set()

    def reset(self) -> None:
        self._taken = set()  # a new set: tasks of the previous loop may still release their locks in the old one

    def take(self, name: LockName) -> Held | None:
        if name in self._taken:
            return None
        self._taken.add(name)
        return MemoryLock(self._taken, name)


class MemoryLock:
    """A name in the set."""

    is_ours = True

    def __init__(self, taken: set[LockName], name: LockName) -> None:
        self._taken = taken
        self._name = name

    def release(self) -> None:
        self._taken.discard(self._name)

    end = release


# --- keyed locks -----------------------------------------------------------------------------------
#
# Your application's keyed locks on SQLite: lock files beside the database, or names in memory (decision 56).

TERM = "SELECT term FROM eventlog_leases WHERE name = :name"


class SqliteKeySession:
    """Lock files that this process holds. A file is removed with its lock, because the number of keys is unlimited."""

    waits = False
    longest_silence = float("inf")

    def __init__(self, connections: Connections, locks: Locks, shard: str, owner: str) -> None:
        self._connections = connections
        self._locks = locks
        self._shard = shard
        self._owner = owner[:255]
        self._held: dict[LockName, Held] = {}
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open and all(lock.is_ours for lock in self._held.values())

    async def open(self) -> None:
        self._connections.guard.enter()
        self._is_open = True

    async def take(self, name: LockName, seconds: int) -> bool:
        self._connections.guard.enter()
        await self.prove()
        try:
            lock = self._locks.take(name)
        except OSError as error:
            self.drop()
            raise DatabaseUnavailable(self._shard, str(error.filename), f"cannot lock: {error.strerror}") from error
        if lock is not None:
            self._held[name] = lock
        return lock is not None

    async def leave(self, name: LockName) -> None:
        await self.prove()
        if (lock := self._held.pop(name, None)) is not None:
            lock.end()

    async def raise_term(self, lease: str) -> int:
        await self.prove()
        row = {"names": as_json([lease]), "name": lease, "owner": self._owner, "now": as_text(utc_now())}

        def raise_and_read(connection: sqlite3.Connection) -> int:
            connection.execute(RAISE_TERMS, row)
            return int(fetch_value(connection, TERM, row))

        return await self._connections.transact(raise_and_read)

    async def prove(self) -> None:
        if not self.is_open:
            self.drop()
            raise DatabaseUnavailable(self._shard, "its lock files", "the files were removed, replaced or closed")

    def drop(self) -> None:
        self._is_open, held = False, self._held
        self._held = {}
        for lock in held.values():
            lock.release()

    async def close(self) -> None:
        self._is_open, held = False, self._held
        self._held = {}
        for lock in held.values():
            lock.end()
