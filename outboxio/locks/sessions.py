"""The lock sessions of a shard, at most as many as the setting ``lock_sessions`` says.

A session holds any number of keys, because a try never waits on the server. A wait on the server is made on a session
that holds no key, so that no key is kept from its release. One session never waits on the server: so a key that is
free is taken at once, however many tasks wait.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from outboxio.errors import DatabaseUnavailable
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import Database
from outboxio.storage.protocols.keyed import KeySession
from outboxio.support.aio import over, to_the_end
from outboxio.support.log import log_of

logger = log_of(__name__)

T = TypeVar("T")

LOOK = 0.1  # seconds between two looks whether a session that holds locks has ended
LONGEST_WAIT = 10.0  # seconds of a wait on the server, which keeps the oldest snapshot of PostgreSQL meanwhile


class Holder(Protocol):
    """A lock that a session holds."""

    def ended(self) -> None:
        """The session has ended, and the lock with it."""


class Member:
    """A lock session, and the locks that the session holds."""

    def __init__(self, session: KeySession) -> None:
        self.session = session
        self.held: dict[LockName, Holder] = {}
        self.busy = 0
        """Calls that use the session, or wait for their turn."""
        self.waits = False
        """True while the session waits on the server."""

    def look(self) -> None:
        """Tell the holders if the session has ended."""
        if self.held and not self.session.is_open:
            held, self.held = self.held, {}
            for holder in held.values():
                holder.ended()

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call on the session to its end, and raise a cancellation afterwards."""
        self.busy += 1
        try:
            return await to_the_end(call())
        finally:
            self.busy -= 1
            self.look()


class Sessions:
    """The lock sessions of a shard."""

    def __init__(self, database: Database, owner: str, wanted: int, heartbeat: float) -> None:
        """``wanted``: the largest number of sessions. ``heartbeat``: the seconds between two proofs."""
        self._database = database
        self._source = database.key_sessions(owner, heartbeat)
        self._most = self._source.most(wanted)
        self._heartbeat = heartbeat
        self.begin_anew()

    def begin_anew(self) -> object:
        """Forget the sessions of a former event loop; returns the forgotten sessions."""
        left = getattr(self, "_members", None)
        self._members: list[Member] = []
        self._keeper: asyncio.Task[None] | None = None
        self._is_checked = False
        return left

    @property
    def open(self) -> int:
        """The number of open sessions."""
        return sum(member.session.is_open for member in self._members)

    async def try_(self, name: LockName, holder: Holder) -> Member | None:
        """Take a lock if the lock is free; the session that holds the lock. A cancelled call holds no lock."""
        member = self._least_busy()
        member.busy += 1
        trying = asyncio.ensure_future(self._try_on(member, name, holder))
        cancelled = await over(trying)
        member.busy -= 1
        if cancelled is None:
            return member if trying.result() else None
        if not trying.cancelled() and trying.exception() is None and trying.result():
            await self.release(member, name)
        raise cancelled

    async def wait(self, name: LockName, holder: Holder, seconds: float) -> Member | None:
        """Wait on the server for at most ``seconds``; ``None`` if the lock was not free, or no session may wait.

        A wait of less than a second may return at once. A cancelled call holds no lock.
        """
        member = self._that_may_wait() if self._source.waits else None
        if member is None:
            return None
        member.waits = True
        is_over = False
        try:
            await self._opened(member)
            is_taken = await member.session.take(name, min(seconds, LONGEST_WAIT))
            is_over = True
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise self._explained(error) from error
        finally:
            if not is_over:
                await to_the_end(member.session.abandon())
            member.waits = False
        if is_taken:
            member.held[name] = holder
        return member if is_taken else None

    async def release(self, member: Member, name: LockName) -> None:
        """Release a lock to the end, however often the task is cancelled. A session that fails is dropped."""
        member.held.pop(name, None)
        try:
            await member.ask(lambda: member.session.release(name))
        except Exception as error:
            # The server releases all locks of a session that ends.
            logger.debug("a keyed lock ends with its session, for it could not be released: %r", error)
            member.session.drop()
            member.look()

    async def raise_term(self, member: Member, name: LockName) -> int:
        """Raise the fencing term on the session that holds the lock."""
        try:
            return await member.ask(lambda: member.session.raise_term(name))
        except Exception as error:
            raise self._explained(error) from error

    async def close(self) -> None:
        """Close all sessions. Locks that are still held are lost."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await over(keeper)
        members, self._members = self._members, []
        for member in members:
            await member.session.close()
            member.look()

    def _least_busy(self) -> Member:
        ready = [member for member in self._members if not member.waits]
        best = min(ready, key=lambda member: member.busy, default=None)
        if best is None or (best.busy and len(self._members) < self._most):
            best = Member(self._source.make())
            self._members.append(best)
        return best

    def _that_may_wait(self) -> Member | None:
        waiting = sum(member.waits for member in self._members)
        if waiting >= self._most - 1:
            return None
        for member in self._members:
            if not (member.waits or member.busy or member.held):
                return member
        if len(self._members) < self._most:
            self._members.append(Member(self._source.make()))
            return self._members[-1]
        return None

    async def _try_on(self, member: Member, name: LockName, holder: Holder) -> bool:
        try:
            await self._opened(member)
            is_taken = await member.session.take(name, 0)
        except Exception as error:
            member.look()
            raise self._explained(error) from error
        if is_taken:
            member.held[name] = holder
        return is_taken

    async def _opened(self, member: Member) -> None:
        if not member.session.is_open:
            member.look()  # before the session is opened again, without the locks
            if not self._is_checked:
                await self._database.refuse_shared_sessions()
                self._is_checked = True
            await member.session.open()
        if self._keeper is None or self._keeper.done():
            # An empty context: the task must not count as a part of the transaction or the handler around this call.
            keep, empty = self._keep(), contextvars.Context()
            self._keeper = asyncio.get_running_loop().create_task(keep, name="outboxio keyed locks", context=empty)

    def _explained(self, error: Exception) -> Exception:
        if self._database.is_unreachable(error) and not isinstance(error, DatabaseUnavailable):
            return DatabaseUnavailable(self._database.name, "its lock sessions", str(error) or type(error).__name__)
        return error

    async def _keep(self) -> None:
        """Notice sessions that ended; prove sessions with locks; close sessions that were idle for two heartbeats."""
        time = asyncio.get_running_loop().time
        proven = time()
        while self._members:
            await asyncio.sleep(min(LOOK, self._heartbeat))
            for member in self._members:
                member.look()
            if time() - proven >= self._heartbeat:
                proven = time()
                await asyncio.gather(*map(self._prove, list(self._members)))

    async def _prove(self, member: Member) -> None:
        if not (member.held or member.busy or member.waits):
            self._members.remove(member)
            await member.session.close()
        elif member.held and member.session.is_open:
            try:
                async with asyncio.timeout(max(1.0, self._heartbeat)):
                    await member.ask(member.session.prove)
            except Exception as error:
                logger.debug("a session with keyed locks does not answer: %r", error)
                member.session.drop()
                member.look()
