"""Keyed locks of the application: the sessions that hold the locks."""

from __future__ import annotations

from typing import Protocol

from outboxio.model.lock_name import LockName


class KeySession(Protocol):
    """A session that holds keyed locks. The locks last as long as the session, which is opened once.

    A failed or interrupted call drops the session, because the server may have given a lock of which this process does
    not know. All locks of the session end with the session.
    """

    @property
    def is_open(self) -> bool: ...

    @property
    def waits(self) -> bool:
        """True if :meth:`take` can wait on the server, in the order in which the calls come."""
        ...

    @property
    def longest_silence(self) -> float:
        """The seconds after which the server ends a silent session."""
        ...

    async def open(self) -> None:
        """Open the session. Raises :class:`DatabaseUnavailable`."""
        ...

    async def take(self, name: LockName, seconds: int) -> bool:
        """Take a lock, and wait up to ``seconds`` on the server; False if the lock was not free.

        A refused caller has a place in the line of processes, if the dialect has a line, until :meth:`leave`.
        """
        ...

    async def leave(self, name: LockName) -> None:
        """Release a lock, or leave the line of processes that wait for the lock."""
        ...

    async def raise_term(self, lease: str) -> int:
        """Raise the fencing term in a row of ``leases``, and return the term.

        The statement runs on this session, so the answer proves that the session held its locks.
        """
        ...

    async def prove(self) -> None:
        """Raise an error if the session, and so its locks, are lost."""
        ...

    def drop(self) -> None:
        """Close the session at once. The server releases the locks."""
        ...

    async def close(self) -> None:
        """Close the session with a goodbye to the server, or give a dropped connection back to its pool."""
        ...
