"""Keyed locks of the application: the sessions that hold the locks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outboxio.model.lock_name import LockName


class KeySession(Protocol):
    """A session that holds keyed locks. The locks last as long as the session, which is opened at the first use.

    After a failure the session is dropped, together with all its locks, because the server may have given a lock of
    which this process does not know.
    """

    @property
    def is_open(self) -> bool: ...

    async def open(self) -> None:
        """Open the session if needed. Raises :class:`DatabaseUnavailable`."""
        ...

    async def take(self, name: LockName, wait: float) -> bool:
        """Take a lock; False if the lock was not free within ``wait`` seconds, or at once with 0.

        The server may round ``wait`` down. A call that waits is made on a session without locks, and may be cancelled:
        the caller then calls :meth:`abandon`.
        """
        ...

    async def release(self, name: LockName) -> None:
        """Release a lock."""
        ...

    async def raise_term(self, name: LockName) -> int:
        """Raise the fencing term in the lease row of ``name``, and return the term.

        The statement runs on this session. So the answer proves that the session held its locks at that moment.
        """
        ...

    async def prove(self) -> None:
        """Raise an error if the session, and so its locks, are lost."""
        ...

    def drop(self) -> None:
        """Close the session at once. The server releases the locks."""
        ...

    async def abandon(self) -> None:
        """Close the session after a wait was cancelled. The server gives no lock to the session any more."""
        ...

    async def close(self) -> None:
        """Close the session, with a goodbye to the server."""
        ...


class KeySessions(Protocol):
    """Makes lock sessions."""

    @property
    def waits(self) -> bool:
        """True if :meth:`KeySession.take` can wait, in the order in which the calls reach the server."""
        ...

    def most(self, wanted: int) -> int:
        """The number of lock sessions that may be open at once, if the setting says ``wanted``."""
        ...

    @property
    def make(self) -> Callable[[], KeySession]:
        """Makes a lock session, which is not open yet."""
        ...
