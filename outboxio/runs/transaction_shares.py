"""Shares of the transactions in which handlers, hooks and jobs work.

A shard has few transactions for these, because each transaction takes a connection that actions need as well. The
shares keep slow handlers from taking all transactions:

* Each handler and each hook lane has a reserved share, up to half of all transactions in sum. The rest is
  free for every handler, so a single handler may have all transactions.
* All jobs together count as one more handler, with a reserved share of a single transaction.
* Handlers leave a transaction to hooks, and hooks leave half of the transactions to handlers.
* Where there is a single transaction, as on SQLite, a handler and a hook may share the transaction: the database
  lets the two write in turn.

The dispatcher never waits in here: a run stays in the queue until :meth:`Shares.take` is True, so that the worker
is free for further handlers. A separate task, as in the inbox, waits in :meth:`Shares.place`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


class Kind:
    """The transactions of all handlers together, or of all hooks together."""

    __slots__ = ("most", "taken", "unclaimed")

    def __init__(self) -> None:
        self.most = 0
        self.taken = 0
        self.unclaimed = 0
        """The transactions that are reserved by shares and not taken."""


class Claim:
    """The share of a handler, or of a hook lane, and the transactions that are taken."""

    __slots__ = ("kind", "share", "taken")

    def __init__(self, kind: Kind, share: int) -> None:
        self.kind = kind
        self.share = share
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
        self._waiting: dict[Claim, deque[asyncio.Future[None]]] = {}

    def of_handler(self) -> Claim:
        """The claim of a further handler."""
        self._handlers.unclaimed += self._share
        return Claim(self._handlers, self._share)

    def of_jobs(self) -> Claim:
        """The claim of all jobs."""
        self._handlers.unclaimed += 1
        return Claim(self._handlers, 1)

    def of_hook(self, *, is_expected: bool) -> Claim:
        """The claim of a further hook lane. Only hooks that are expected have a share."""
        self._hooks.unclaimed += is_expected
        return Claim(self._hooks, int(is_expected))

    def may_take(self, claim: Claim) -> bool:
        """True if a transaction is free for the claim."""
        kind, free = claim.kind, self._total - self._taken
        if not free or kind.taken >= kind.most:
            return False
        return claim.taken < claim.share or free > self._kept

    @property
    def _kept(self) -> int:
        """The transactions that are kept for claims below the share. All hooks together keep a single transaction."""
        return min(self._handlers.unclaimed + min(self._hooks.unclaimed, 1), self._half)

    def take(self, claim: Claim) -> bool:
        """Take a transaction; False if none is free for the claim."""
        if not self.may_take(claim):
            return False
        kind = claim.kind
        kind.unclaimed -= claim.taken < claim.share
        claim.taken += 1
        kind.taken += 1
        self._taken += 1
        return True

    def give_back(self, claim: Claim) -> None:
        """Give a transaction back. A task that waits for a transaction gets the transaction at once."""
        kind = claim.kind
        claim.taken -= 1
        kind.taken -= 1
        kind.unclaimed += claim.taken < claim.share
        self._taken -= 1
        self._admit()

    # --- waiting -------------------------------------------------------------------------------

    @asynccontextmanager
    async def place(self, claim: Claim) -> AsyncGenerator[None]:
        """Hold a transaction for a while. Waiting tasks take turns, claim by claim."""
        if claim in self._waiting or not self.take(claim):
            await self._wait(claim)
        try:
            yield
        finally:
            self.give_back(claim)

    async def _wait(self, claim: Claim) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(claim, deque()).append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                self.give_back(claim)  # the task was served, and cancelled before going on
            else:
                self._stop_waiting(claim, waiter)
            raise

    def _stop_waiting(self, claim: Claim, waiter: asyncio.Future[None]) -> None:
        tasks = self._waiting.get(claim)
        if tasks is not None:
            with suppress(ValueError):
                tasks.remove(waiter)
            if not tasks:
                del self._waiting[claim]

    def _admit(self) -> None:
        """Give free transactions to the tasks that wait."""
        for claim in list(self._waiting):
            tasks = self._waiting[claim]
            while tasks and (tasks[0].done() or tasks[0].get_loop().is_closed()):
                tasks.popleft()
            if tasks and self.take(claim):
                tasks.popleft().set_result(None)
                self._waiting[claim] = self._waiting.pop(claim)  # all claims come before the next task of this claim
            if not tasks:
                del self._waiting[claim]
