"""The lock manager in isolation: which changes it reports, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import pytest

from outboxio.model.lock_name import LockName
from outboxio.model.outcome import Lease
from outboxio.runtime.lock_manager import LockManager
from outboxio.runtime.lock_plan import EveryLock, LockMoves
from outboxio.storage.connections.driver import Proof
from outboxio.storage.protocols import LockGrant
from outboxio.support.aio import Signal

MAIL, BILLS = LockName("app", "dispatch", "mail"), LockName("app", "dispatch", "bills")
NOW = datetime(2026, 1, 1)


class Lock:
    """A cluster lock whose names are free, except those in ``held_elsewhere``."""

    def __init__(self) -> None:
        self.held_elsewhere: set[LockName] = set()
        self.terms: dict[LockName, int] = {}
        self.released: list[LockName] = []
        self.lose: Callable[[], None] = lambda: None
        self.is_broken = False
        self.proof: Proof | None = None

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        free = [name for name in names if name not in self.held_elsewhere]
        self.terms |= {name: self.terms.get(name, 0) + 1 for name in free}
        return {name: LockGrant(self.terms[name], 0) for name in free}

    async def heartbeat(self) -> Proof:
        if self.is_broken:
            raise ConnectionResetError("the session has ended")
        return Proof(time.monotonic(), NOW, NOW, NOW)

    async def release(self, names: Sequence[LockName]) -> None:
        self.released += names

    async def listen(self, on_wakeup: Callable[[str], None]) -> None: ...

    def when_lost(self, callback: Callable[[], None]) -> None:
        self.lose = callback

    async def close(self) -> None: ...


class Clock:
    def correct(self, *times: datetime) -> None: ...


class Observer:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.leases: dict[LockName, Lease] = {}
        self.until = float("-inf")

    def lock_taken(self, name: LockName, lease: Lease) -> None:
        self.leases[name] = lease
        self.seen.append(f"taken {name.handler_name}")

    def lock_lost(self, name: LockName) -> None:
        assert self.until == float("-inf") or self.leases[name].held is False
        self.seen.append(f"lost {name.handler_name}")

    def locks_proven_until(self, until: float) -> None:
        self.until = until


class Parts:
    def __init__(self, heartbeat: float = 5.0) -> None:
        self.lock, self.observer, self.wake = Lock(), Observer(), Signal()
        lock: Any = self.lock
        clock: Any = Clock()
        self.manager = LockManager(
            lock, EveryLock([MAIL, BILLS]), clock,
            heartbeat=heartbeat, observer=self.observer, on_wakeup=lambda payload: None, wake=self.wake,
        )  # fmt: skip


async def test_free_locks_are_acquired_in_one_round_and_outlast_a_heartbeat() -> None:
    parts = Parts()
    parts.lock.held_elsewhere = {BILLS}
    assert (await parts.manager.run_once()).found == 1
    assert (parts.manager.holds(MAIL), parts.manager.holds(BILLS)) == (True, False)
    assert parts.manager.missing == [BILLS]
    assert parts.observer.until > asyncio.get_running_loop().time() + 5.0


async def test_a_lost_session_ends_trust_before_the_locks_are_reported_lost() -> None:
    parts = Parts()
    await parts.manager.run_once()
    parts.lock.lose()
    assert parts.observer.until == float("-inf")
    assert parts.observer.seen[2:] == ["lost mail", "lost bills"]
    assert parts.wake.is_set


async def test_a_suspect_lock_is_lost_at_once_and_released_before_retrying() -> None:
    parts = Parts()
    await parts.manager.run_once()
    lease = parts.observer.leases[MAIL]
    parts.manager.suspect(lease)
    assert parts.observer.seen[2:] == ["lost mail"]
    assert parts.manager.holds(BILLS)
    assert parts.wake.is_set
    await parts.manager.run_once()
    assert parts.lock.released == [MAIL]
    assert parts.manager.holds(MAIL)
    assert lease.term == 2, "no other process held the lock in between, so the lease continues"


async def test_a_failed_heartbeat_loses_every_lock_and_wakes_no_round() -> None:
    parts = Parts(heartbeat=0.0)
    await parts.manager.run_once()
    parts.lock.is_broken = True
    parts.manager._trusted_until = float(
        "inf"
    )  # otherwise the round would treat the failure as the end of a silent session
    with pytest.raises(ConnectionResetError):
        await parts.manager.run_once()
    assert parts.observer.seen[2:] == ["lost mail", "lost bills"]
    assert not parts.wake.is_set


async def test_released_locks_are_reported_lost_before_their_release() -> None:
    parts = Parts()
    await parts.manager.run_once()
    await parts.manager.release()
    assert parts.observer.seen[2:] == ["lost mail", "lost bills"]
    assert parts.lock.released == [MAIL, BILLS]
    assert parts.manager.not_held == [MAIL, BILLS]


# --- plans that divide the locks -------------------------------------------------------------------


class Plan:
    """A plan whose next moves the test sets."""

    has_more = True

    def __init__(self) -> None:
        self.names = [MAIL, BILLS]
        self.back: list[LockName] = []
        self.tries: list[LockName] = []
        self.announced: list[LockName] = []

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        return LockMoves(self.back, self.tries)

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None: ...

    def released(self, names: Collection[LockName]) -> None:
        self.announced += names


def planned() -> tuple[Parts, Plan]:
    parts, plan = Parts(), Plan()
    parts.manager._plan = plan
    return parts, plan


async def test_only_planned_locks_are_tried() -> None:
    parts, plan = planned()
    plan.tries = [BILLS]
    assert (await parts.manager.run_once()).more, "the plan may have further moves now"
    assert parts.observer.seen == ["taken bills"]
    assert (parts.manager.missing, parts.manager.not_held) == ([MAIL], [MAIL])


async def test_a_lock_is_reported_lost_before_its_release_and_announced_after() -> None:
    parts, plan = planned()
    plan.tries = [MAIL, BILLS]
    await parts.manager.run_once()

    async def release(names: Sequence[LockName]) -> None:
        assert parts.observer.seen[-1] == "lost mail"
        assert plan.announced == []
        parts.lock.released += names

    parts.lock.release = release  # type: ignore[method-assign]
    plan.tries, plan.back = [], [MAIL]
    await parts.manager.run_once()

    assert parts.lock.released == plan.announced == [MAIL]
    assert not parts.manager.holds(MAIL)
    assert parts.manager.holds(BILLS), "the other locks are still trusted"
