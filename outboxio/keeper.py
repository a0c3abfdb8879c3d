"""Keeping the cluster locks of one shard: trying for those that are lacking, and proving those that are held.

A lock is worth what its session is worth. Three things end the trust in it: the driver reports the session's end, a
heartbeat fails, or the last proof is older than 1.8 times the heartbeat interval, which is when the server itself ends
a silent session. The last one needs no report, so a process that was frozen starts nothing when it wakes up.

Each acquisition raises the term in ``leases``; outcomes are written only under the newest one. If this process takes
a lock again and its term went up by exactly one, nobody held it in between: what is in flight stays valid. If another
held it and did not give it back, that one may have died of what it was running: the lease says so (``crashes.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from outboxio.backoff import jittered
from outboxio.clock import ShardClock, utc_now
from outboxio.names import LockName
from outboxio.outcome import Lease
from outboxio.round import Round
from outboxio.storage.protocols import LONGEST_SILENCE, ClusterLock

logger = logging.getLogger(__name__)

STANDBY_DELAY = 0.2  # seconds between two tries for locks that another process holds


class LockKeeper:
    """Holds what it can of a set of lock names."""

    def __init__(
        self,
        lock: ClusterLock,
        names: Iterable[LockName],
        clock: ShardClock,
        *,
        heartbeat: float,
        taken: Callable[[LockName, Lease], None],
        lost: Callable[[LockName], None],
        proven_until: Callable[[float], None],
        heard: Callable[[str], None],
    ) -> None:
        self.wake: Callable[[], None] = _nothing
        self.gains = 0
        """How often a lock was taken, or was to be trusted again."""
        self._lock = lock
        self._leases: dict[LockName, Lease | None] = dict.fromkeys(names)
        self._clock = clock
        self._heartbeat = heartbeat
        self._taken = taken
        self._lost = lost
        self._proven_until = proven_until
        self._heard = heard
        self._trusted_until = float("-inf")
        self._beat_at = float("-inf")
        self._turn = asyncio.Lock()
        self._doubted: list[LockName] = []
        lock.when_lost(self._session_ended)

    def holds(self, name: LockName) -> bool:
        """Whether this process holds the lock, as far as anybody can know."""
        lease = self._leases.get(name)
        return lease is not None and lease.held and asyncio.get_running_loop().time() < self._trusted_until

    @property
    def lacking(self) -> list[LockName]:
        """The names that another process holds, or that nobody has tried for yet."""
        return [name for name, lease in self._leases.items() if lease is None or not lease.held]

    @property
    def not_held(self) -> list[LockName]:
        """The same, and those in which the trust has ended until the session is proven again."""
        return [name for name in self._leases if not self.holds(name)]

    def poll_delay(self) -> float:
        """Seconds until the next round is due."""
        return min(STANDBY_DELAY, self._heartbeat) if self.lacking else self._heartbeat

    async def run_once(self) -> Round:
        """Try for what is lacking, and prove the session if that is due."""
        async with self._turn:
            try:
                await self._lock.listen(self._heard)
                await self._beat_if_due()
                await self._give_back_doubted()
                taken = await self._try_lacking()
            except BaseException:
                self._lose_all()  # and no wake-up: the loop decides when to try again
                raise
        return Round(taken)

    def doubt(self, lease: Lease) -> None:
        """The database refuses what is written under this lease: give its lock back, and take it with a new term.

        So it is if somebody emptied or restored the tables under a running process.
        """
        for name, held in self._leases.items():
            if held is lease and lease.held:
                logger.warning("term %d of %s is over; taking the lock anew", lease.term, name.lease)
                lease.held = False
                self._doubted.append(name)
                self._lost(name)
                self.wake()

    async def release(self) -> None:
        """Give every lock back, so that a standby takes over at its next try."""
        async with self._turn:
            held = [name for name, lease in self._leases.items() if lease is not None and lease.held]
            self._let_go()
            try:
                await self._lock.release(held)
            finally:
                await self._lock.close()

    async def _beat_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._beat_at < self._heartbeat * 0.9:
            return
        asked = utc_now()
        database_now = await self._lock.heartbeat()
        self._clock.correct(database_now, asked, utc_now())
        self._beat_at = now
        self._prove(now)

    async def _give_back_doubted(self) -> None:
        if self._doubted:
            doubted, self._doubted = self._doubted, []
            await self._lock.release(doubted)

    async def _try_lacking(self) -> int:
        lacking = self.lacking
        if not lacking:
            return 0
        now = asyncio.get_running_loop().time()
        acquired = await self._lock.acquire(lacking)
        self._prove(now)
        for name, ours in acquired.items():
            self._take(name, ours.term, follows_crash=ours.follows_crash)
        return len(acquired)

    def _take(self, name: LockName, term: int, *, follows_crash: bool = False) -> None:
        self.gains += 1
        lease = self._leases[name]
        if lease is not None and term == lease.term + 1:
            lease.term, lease.held = term, True
            follows_crash = False
        else:
            lease = self._leases[name] = Lease(name.lease, name.handler_name, term, follows_crash=follows_crash)
        how = "; its former holder did not give it back" if follows_crash else ""
        logger.info("took %s, term %d%s", name.lease, term, how, extra={"lock": name.lease, "term": term})
        self._taken(name, lease)

    def _prove(self, moment: float) -> None:
        """The session lived at ``moment``, so the server keeps it for its longest silence after that."""
        self.gains += asyncio.get_running_loop().time() >= self._trusted_until
        self._trusted_until = moment + LONGEST_SILENCE * self._heartbeat
        self._proven_until(self._trusted_until)

    def _session_ended(self) -> None:
        self._lose_all()
        self.wake()

    def _lose_all(self) -> None:
        if any(lease is not None and lease.held for lease in self._leases.values()):
            logger.warning("the session that holds the cluster locks has ended; starting nothing until they are back")
        self._let_go()

    def _let_go(self) -> None:
        self._trusted_until = self._beat_at = float("-inf")
        self._proven_until(self._trusted_until)
        for name, lease in self._leases.items():
            if lease is not None and lease.held:
                lease.held = False
                self._lost(name)


def standby_pause() -> float:
    """The jittered seconds between two looks at what another process is doing."""
    return jittered(STANDBY_DELAY, 0.25)


def _nothing() -> None:
    return None
