"""Divide the transactions of a shard among handlers, hooks and jobs.

A shard has few transactions, because each one occupies a connection that actions need as well. The shares keep slow
handlers from occupying all transactions:

* Each handler and each hook lane has a reserved share, together up to half of all transactions. The rest is
  available to every handler, so a single handler may use all of them.
* All jobs together count as one more handler, with a reserved share of a single transaction.
* Handlers always leave one transaction to hooks, and hooks leave half of the transactions to handlers.
* Where there is a single transaction, as on SQLite, a handler and a hook may share it: the database
  lets the two write in turn.

The dispatcher never waits here: a run stays in its queue until :meth:`Shares.take` returns True, so that the worker
is free for other handlers. A separate task, as in the inbox, waits in :meth:`Shares.hold`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


class Kind:
    """The transactions of all handlers together, or of all hooks together."""

    __slots__ = ("most", "taken", "unused")

    def __init__(self) -> None:
        self.most = 0
        self.taken = 0
        self.unused = 0
        """The transactions that are reserved by shares and not taken."""


class TransactionShare:
    """The share of a handler, or of a hook lane, and the transactions that are taken."""

    __slots__ = ("kind", "reserved", "taken")

    def __init__(self, kind: Kind, reserved: int) -> None:
        self.kind = kind
        self.reserved = reserved
        self.taken = 0


class Shares:
    """A number of transactions, divided among a known number of handlers and hook lanes."""

    def __init__(self, total: int, *, handlers: int, hooks: int = 0) -> None:
        both = bool(handlers and hooks)
        self._total = max(total, 2) if both else total
        self._half = total // 2
        self._taken = 0
        self._handlers, self._hooks = Kind(), Kind()
        self._handlers.most = max(1, total - both)
        self._hooks.most = max(1, total // 2) if both else total
        self._share = max(1, total // (2 * max(1, handlers)))
        self._waiting: dict[TransactionShare, deque[asyncio.Future[None]]] = {}

    def of_handler(self) -> TransactionShare:
        """Register a handler, and return its share."""
        self._handlers.unused += self._share
        return TransactionShare(self._handlers, self._share)

    def of_jobs(self) -> TransactionShare:
        """Return the share of all jobs."""
        self._handlers.unused += 1
        return TransactionShare(self._handlers, 1)

    def of_hook(self, *, is_expected: bool) -> TransactionShare:
        """Register a hook lane, and return its share. Only expected hooks have reserved transactions."""
        self._hooks.unused += is_expected
        return TransactionShare(self._hooks, int(is_expected))

    def may_take(self, share: TransactionShare) -> bool:
        """Return True if a transaction is available to the share."""
        kind, free = share.kind, self._total - self._taken
        if not free or kind.taken >= kind.most:
            return False
        return share.taken < share.reserved or free > self._kept

    @property
    def _kept(self) -> int:
        """The transactions kept for shares that use less than their reserve. All hooks together keep one."""
        return min(self._handlers.unused + min(self._hooks.unused, 1), self._half)

    def take(self, share: TransactionShare) -> bool:
        """Take a transaction; return False if none is available to the share."""
        if not self.may_take(share):
            return False
        kind = share.kind
        kind.unused -= share.taken < share.reserved
        share.taken += 1
        kind.taken += 1
        self._taken += 1
        return True

    def release(self, share: TransactionShare) -> None:
        """Release a transaction, and pass it to a waiting task if there is one."""
        kind = share.kind
        share.taken -= 1
        kind.taken -= 1
        kind.unused += share.taken < share.reserved
        self._taken -= 1
        self._admit()

    # --- waiting -------------------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, share: TransactionShare) -> AsyncGenerator[None]:
        """Hold a transaction inside the ``async with`` block. Waiting tasks take turns, share by share."""
        if share in self._waiting or not self.take(share):
            await self._wait(share)
        try:
            yield
        finally:
            self.release(share)

    async def _wait(self, share: TransactionShare) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(share, deque()).append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                self.release(share)  # the task got the transaction, and was cancelled before it resumed
            else:
                self._stop_waiting(share, waiter)
            raise

    def _stop_waiting(self, share: TransactionShare, waiter: asyncio.Future[None]) -> None:
        tasks = self._waiting.get(share)
        if tasks is not None:
            with suppress(ValueError):
                tasks.remove(waiter)
            if not tasks:
                del self._waiting[share]

    def _admit(self) -> None:
        """Pass available transactions to waiting tasks."""
        for share in list(self._waiting):
            tasks = self._waiting[share]
            while tasks and (tasks[0].done() or tasks[0].get_loop().is_closed()):
                tasks.popleft()
            if tasks and self.take(share):
                tasks.popleft().set_result(None)
                self._waiting[share] = self._waiting.pop(
                    share
                )  # all other shares come before the next task of this one
            if not tasks:
                del self._waiting[share]
