"""The lock manager: takes the cluster locks of a shard, and proves that this process still holds the locks.

A lock is worth as much as the session on the server. The trust in a lock ends in three cases:

* The driver reports the end of the session.
* A heartbeat fails.
* The last proof is older than 1.8 times the heartbeat interval. At that age the server itself ends a silent session.
  This case needs no report, so a process that was frozen starts no run when the process goes on.

Where the session lives in a thread (``storage/connections/threaded_lock.py``), the thread sends heartbeats by itself.
The lock manager takes in the thread's proofs in each round, and at each question after the end of the trust. So the
trust is right as soon as a blocked event loop goes on (decision 4).

Each acquisition raises the term in ``leases``, and outcomes are written only under the newest term (decision 3). If
this process takes a lock again and the term went up by exactly one, the lock was free in between: the runs in flight
remain valid. If another process held the lock and did not give the lock back, a handler may have ended that process.
The lease says so (``runs/poison.py``).

A lock plan says which locks this process may hold, and which locks a round tries and gives back. Processes that share
handlers have a plan that divides the partitions (``lock_plan.py``). All further processes try every lock.
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

STANDBY_DELAY = 0.2  # seconds between two tries for locks that are not free


class LockObserver(Protocol):
    """Hears of each change at once, because no run may start between the loss of a lock and the report."""

    def lock_taken(self, name: LockName, lease: Lease) -> None:
        """This process holds the lock."""

    def lock_lost(self, name: LockName) -> None:
        """This process does not hold the lock any longer."""

    def locks_proven_until(self, moment: float) -> None:
        """The trust in the locks ends at this moment of the event loop's clock, without a new proof."""


class LockManager:
    """Holds the locks of a plan, as far as no other process holds a lock."""

    def __init__(
        self,
        lock: ClusterLock,
        plan: LockPlan,
        clock: ShardClock,
        *,
        heartbeat: float,
        observer: LockObserver,
        heard: Callable[[str], None],
        wake: Signal,
    ) -> None:
        """``heartbeat``: seconds. ``heard``: receives the wake-ups between processes. ``wake``: asks for a round."""
        self.gains = 0
        """The number of times that a lock was taken, or became trusted again."""
        self._lock = lock
        self._plan = plan
        self._leases: dict[LockName, Lease] = {}
        """The leases of all locks that this process has ever taken."""
        self._clock = clock
        self._heartbeat = heartbeat
        self._observer = observer
        self._heard = heard
        self._wake = wake
        self._trusted_until = float("-inf")
        self._beat_at = float("-inf")
        self._taken_in: Proof | None = None
        self._turn = asyncio.Lock()
        self._suspected: list[LockName] = []
        lock.when_lost(self._session_ended)

    def holds(self, name: LockName) -> bool:
        """True if this process holds the lock, by the last proof."""
        lease = self._leases.get(name)
        return lease is not None and lease.held and self._is_trusted()

    @property
    def held(self) -> dict[LockName, Lease]:
        """The locks that this process has taken, with the leases."""
        return {name: lease for name, lease in self._leases.items() if lease.held}

    @property
    def lacking(self) -> list[LockName]:
        """The locks that this process has not taken: locks of another process, and locks before their first try."""
        held = self.held
        return [name for name in self._plan.names if name not in held]

    @property
    def not_held(self) -> list[LockName]:
        """The lacking locks, and the locks that have to be proven again."""
        return [name for name in self._plan.names if not self.holds(name)]

    def poll_delay(self) -> float:
        """The seconds until the next round is due."""
        held = self.held
        is_lacking = any(name not in held for name in self._plan.names)
        return min(STANDBY_DELAY, self._heartbeat) if is_lacking else self._heartbeat

    async def run_once(self) -> RoundResult:
        """Prove the session if a proof is due, give back the locks of the plan, and try the locks of the plan.

        After a round that has taken locks, the plan may have further moves.
        """
        async with self._turn:
            was_silent = self._holds_any and not self._is_trusted()
            try:
                await self._lock.listen(self._heard)
                await self._beat_if_due()
                await self._give_back_suspected()
                taken = await self._follow_plan()
            except BaseException as error:
                self._lose_all()  # without a wake-up: the loop decides when to try again
                if was_silent and isinstance(error, Exception):
                    # The server has ended the silent session. The next round opens a session, and asks the database for
                    # the locks.
                    logger.debug("what was said on the session that was silent for too long failed: %r", error)
                    return RoundResult(0, more=True)
                raise
        return RoundResult(taken, more=taken > 0 and self._plan.has_more)

    def look_for_proof(self) -> None:
        """Take in a proof that the thread has made since the last call."""
        proof = self._lock.proof
        if proof is not None and proof is not self._taken_in and self._holds_any:
            self._take_in(proof)

    def suspect(self, lease: Lease) -> None:
        """Give back a lock and take it with a new term: the database refuses outcomes under its lease.

        That happens if an operator empties or restores the tables while the process runs.
        """
        for name, held in self._leases.items():
            if held is lease and lease.held:
                logger.warning(
                    "term %d of %s is over; taking the lock anew", lease.term, name.lease,
                    lock=name.lease, term=lease.term,
                )  # fmt: skip
                lease.held = False
                self._suspected.append(name)
                self._observer.lock_lost(name)
                self._wake.set()

    async def release(self) -> None:
        """Give every lock back, so that a standby process takes over at the next try."""
        async with self._turn:
            held = list(self.held)
            self._let_go()
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
        self._clock.correct(proof.database_now, proof.asked, proof.answered)
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

    async def _give_back_suspected(self) -> None:
        if self._suspected:
            suspected, self._suspected = self._suspected, []
            await self._lock.release(suspected)

    async def _follow_plan(self) -> int:
        moves = self._plan.next_moves(self.held)
        if moves.back:
            await self._give_back(moves.back)
        if not moves.tries:
            return 0
        now = asyncio.get_running_loop().time()
        acquired = await self._lock.acquire(moves.tries)
        self._prove(now)
        self._plan.taken(acquired)
        for name, grant in acquired.items():
            self._take(name, grant.term, follows_crash=grant.follows_crash)
        return len(acquired)

    async def _give_back(self, names: Sequence[LockName]) -> None:
        """Give locks back to the cluster. No run of their slots is in flight."""
        for name in names:
            lease = self._leases[name]
            logger.info("gives back %s, term %d", name.lease, lease.term, lock=name.lease, term=lease.term)
            lease.held = False
            self._observer.lock_lost(name)
        await self._lock.release(names)
        self._plan.given_back(names)

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
        how = "; its former holder did not give it back" if follows_crash else ""
        logger.info("took %s, term %d%s", name.lease, term, how, lock=name.lease, term=term)
        self._observer.lock_taken(name, lease)

    def _prove(self, moment: float) -> None:
        """The session lived at ``moment``, so the server keeps the session for the longest silence from then on."""
        self.gains += asyncio.get_running_loop().time() >= self._trusted_until
        self._trusted_until = max(self._trusted_until, moment + LONGEST_SILENCE * self._heartbeat)
        self._observer.locks_proven_until(self._trusted_until)

    def _session_ended(self) -> None:
        self._lose_all()
        self._wake.set()

    def _lose_all(self) -> None:
        if self._holds_any:
            logger.warning("the session that holds the cluster locks has ended; starting nothing until they are back")
        self._let_go()

    def _let_go(self) -> None:
        self._trusted_until = self._beat_at = float("-inf")
        self._observer.locks_proven_until(self._trusted_until)
        for name, lease in self._leases.items():
            if lease.held:
                lease.held = False
                self._observer.lock_lost(name)


def standby_pause() -> float:
    """The seconds, with jitter, between two questions to the database about the work of another process."""
    return jittered(STANDBY_DELAY, 0.25)
