"""The lock manager: acquires the cluster locks of a shard, and proves that this process still holds them.

A lock lasts as long as its session on the server. A lock is no longer trusted in three cases:

* The driver reports that the session has ended.
* A heartbeat fails.
* The last proof is older than 1.8 times the heartbeat interval, after which the server itself ends an idle session.
  This needs no report, so a process that was suspended starts no run when it resumes.

If the session lives in a thread (``storage/connections/threaded_lock.py``), the thread sends the heartbeats. The lock
manager reads its proofs in each round, and whenever it is called after the trust has ended. So the locks are trusted
again as soon as a blocked event loop resumes (decision 4).

Each acquisition raises the term in ``leases``, and outcomes are written only under the newest term (decision 3). If
this process reacquires a lock and the term rose by exactly one, no other process held it in between, and the runs in
flight remain valid. If another process held the lock without releasing it, a handler may have crashed that process.
The lease records this (``runs/poison.py``).

A lock plan determines which locks this process may hold, and which a round tries and releases. Processes that share
handlers have a plan that divides the partitions (``lock_plan.py``). All others try every lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from outboxio.loops.loop import RoundResult
from outboxio.model.lock_name import LockName
from outboxio.model.outcome import Lease
from outboxio.runtime.lock_plan import LockPlan
from outboxio.storage.connections.driver import Proof
from outboxio.storage.protocols import LONGEST_SILENCE, SHARE_OF_HEARTBEAT, ClusterLock
from outboxio.support import machine
from outboxio.support.aio import Signal
from outboxio.support.clock import ShardClock
from outboxio.support.duration import jittered
from outboxio.support.log import log_of

logger = log_of(__name__)

STANDBY_DELAY = 0.2  # seconds between two attempts to acquire locks that are not free


class LockObserver(Protocol):
    """Called on each change at once, because no run may start between the loss of a lock and its report."""

    def lock_taken(self, name: LockName, lease: Lease) -> None:
        """This process has acquired the lock."""

    def lock_lost(self, name: LockName) -> None:
        """This process no longer holds the lock."""

    def locks_proven_until(self, until: float) -> None:
        """The locks are trusted until this event loop time, unless they are proven again."""


class LockManager:
    """Holds the locks of a plan that no other process holds."""

    def __init__(
        self,
        lock: ClusterLock,
        plan: LockPlan,
        clock: ShardClock,
        *,
        heartbeat: float,
        observer: LockObserver,
        on_wakeup: Callable[[str], None],
        wake: Signal,
    ) -> None:
        """``heartbeat``: seconds. ``on_wakeup``: receives wake-ups of other processes. ``wake``: requests a round."""
        self.gains = 0
        """How often a lock was acquired, or became trusted again."""
        self._lock = lock
        self._plan = plan
        self._leases: dict[LockName, Lease] = {}
        """The leases of all locks that this process has ever acquired."""
        self._clock = clock
        self._heartbeat = heartbeat
        self._observer = observer
        self._on_wakeup = on_wakeup
        self._wake = wake
        self._trusted_until = float("-inf")
        self._beat_at = float("-inf")
        self._taken_in: Proof | None = None
        self._turn = asyncio.Lock()
        self._suspected: list[LockName] = []
        lock.when_lost(self._session_ended)

    def holds(self, name: LockName) -> bool:
        """Return True if this process holds the lock, by the last proof."""
        lease = self._leases.get(name)
        return lease is not None and lease.held and self._is_trusted()

    @property
    def held(self) -> dict[LockName, Lease]:
        """The locks that this process has acquired, with their leases."""
        return {name: lease for name, lease in self._leases.items() if lease.held}

    @property
    def missing(self) -> list[LockName]:
        """The locks that this process has not acquired: those of another process, and those not tried yet."""
        held = self.held
        return [name for name in self._plan.names if name not in held]

    @property
    def not_held(self) -> list[LockName]:
        """The missing locks, and the locks that have to be proven again."""
        return [name for name in self._plan.names if not self.holds(name)]

    def poll_delay(self) -> float:
        """Return the seconds until the next round is due."""
        held = self.held
        has_missing = any(name not in held for name in self._plan.names)
        return min(STANDBY_DELAY, self._heartbeat) if has_missing else self._heartbeat

    async def run_once(self) -> RoundResult:
        """Prove the session if a proof is due, then release and try locks by the plan.

        After a round that has acquired locks, the plan may have further moves.
        """
        async with self._turn:
            was_idle = self._holds_any and not self._is_trusted()
            try:
                await self._lock.listen(self._on_wakeup)
                await self._beat_if_due()
                await self._release_suspected()
                taken = await self._follow_plan()
            except BaseException as error:
                self._lose_all()  # without a wake-up: the loop decides when to retry
                if was_idle and isinstance(error, Exception):
                    # The server has ended the idle session. The next round opens a new one and reacquires the locks.
                    logger.debug("an operation on an unresponsive session failed: %r", error)
                    return RoundResult(0, more=True)
                raise
        return RoundResult(taken, more=taken > 0 and self._plan.has_more)

    def look_for_proof(self) -> None:
        """Process a proof that the thread has made since the last call."""
        proof = self._lock.proof
        if proof is not None and proof is not self._taken_in and self._holds_any:
            self._take_in(proof)

    def suspect(self, lease: Lease) -> None:
        """Release a lock and reacquire it with a new term, because the database rejects outcomes under its lease.

        This happens if an operator empties or restores the tables while the process runs.
        """
        for name, held in self._leases.items():
            if held is lease and lease.held:
                logger.warning(
                    "term %d of %s has ended; reacquiring the lock", lease.term, name.lease,
                    lock=name.lease, term=lease.term,
                )  # fmt: skip
                lease.held = False
                self._suspected.append(name)
                self._observer.lock_lost(name)
                self._wake.set()

    async def release(self) -> None:
        """Release every lock, so that a standby process takes over at its next attempt."""
        async with self._turn:
            held = list(self.held)
            self._drop_all()
            try:
                await self._lock.release(held)
            finally:
                await self._lock.close()

    async def _beat_if_due(self) -> None:
        self.look_for_proof()
        if asyncio.get_running_loop().time() - self._beat_at >= SHARE_OF_HEARTBEAT * self._heartbeat:
            self._take_in(await self._lock.heartbeat())

    def _take_in(self, proof: Proof) -> None:
        self._taken_in = proof
        self._clock.correct(proof.database_now, proof.sent, proof.received)
        self._beat_at = asyncio.get_running_loop().time() - (machine.monotonic() - proof.sent_at)
        self._prove(self._beat_at)

    @property
    def _holds_any(self) -> bool:
        return any(lease.held for lease in self._leases.values())

    def _is_trusted(self) -> bool:
        if asyncio.get_running_loop().time() < self._trusted_until:
            return True
        self.look_for_proof()
        return asyncio.get_running_loop().time() < self._trusted_until

    async def _release_suspected(self) -> None:
        if self._suspected:
            suspected, self._suspected = self._suspected, []
            await self._lock.release(suspected)

    async def _follow_plan(self) -> int:
        moves = self._plan.next_moves(self.held)
        if moves.back:
            await self._release_names(moves.back)
        if not moves.tries:
            return 0
        now = asyncio.get_running_loop().time()
        acquired = await self._lock.acquire(moves.tries)
        self._prove(now)
        self._plan.taken(acquired)
        for name, grant in acquired.items():
            self._take(name, grant.term, follows_crash=grant.follows_crash)
        return len(acquired)

    async def _release_names(self, names: Sequence[LockName]) -> None:
        """Release locks whose slots have no run in flight."""
        for name in names:
            lease = self._leases[name]
            logger.info("releasing %s, term %d", name.lease, lease.term, lock=name.lease, term=lease.term)
            lease.held = False
            self._observer.lock_lost(name)
        await self._lock.release(names)
        self._plan.released(names)

    def _take(self, name: LockName, term: int, *, follows_crash: bool = False) -> None:
        self.gains += 1
        lease = self._leases.get(name)
        if lease is not None and term == lease.term + 1:
            lease.term, lease.held = term, True
            follows_crash = False
        else:
            lease = self._leases[name] = Lease(
                name.lease, name.handler_name, term, follows_crash=follows_crash, partition=name.partition
            )
        how = "; its previous holder did not release it" if follows_crash else ""
        logger.info("acquired %s, term %d%s", name.lease, term, how, lock=name.lease, term=term)
        self._observer.lock_taken(name, lease)

    def _prove(self, at: float) -> None:
        """Extend the trust: the session was alive at ``at``, and the server keeps an idle session for a while."""
        self.gains += asyncio.get_running_loop().time() >= self._trusted_until
        self._trusted_until = max(self._trusted_until, at + LONGEST_SILENCE * self._heartbeat)
        self._observer.locks_proven_until(self._trusted_until)

    def _session_ended(self) -> None:
        self._lose_all()
        self._wake.set()

    def _lose_all(self) -> None:
        if self._holds_any:
            logger.warning("cluster lock session lost; dispatch paused until the locks are reacquired")
        self._drop_all()

    def _drop_all(self) -> None:
        self._trusted_until = self._beat_at = float("-inf")
        self._observer.locks_proven_until(self._trusted_until)
        for name, lease in self._leases.items():
            if lease.held:
                lease.held = False
                self._observer.lock_lost(name)


def standby_pause() -> float:
    """Return the seconds, with jitter, between two checks of the work of another process."""
    return jittered(STANDBY_DELAY, 0.25)
