"""A cluster lock whose session runs in a thread, so that a blocked event loop does not lose the lock.

The session, LISTEN and the heartbeat run on the event loop of a thread (``loops/owner.py``). Your application's event
loop sends the work of the lock to the thread, and can read the last proof at any time, even right after it was blocked.
The thread sends heartbeats only while your application's event loop runs, or has been blocked for at most
``longest_block`` seconds, because a process that never continues must not keep its locks. After that time the server
ends the inactive session, and a standby takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from outboxio.loops.blocked_loop import LoopWatch
from outboxio.loops.owner import Background, EventLoopGuard, call_soon
from outboxio.model.lock_name import LockName
from outboxio.storage.connections.driver import Proof
from outboxio.storage.connections.health import ServerConnections
from outboxio.storage.connections.loop_connection import BaseLoopConnection
from outboxio.storage.protocols import LONGEST_SILENCE, SHARE_OF_HEARTBEAT, ClusterLock, LockGrant
from outboxio.support import machine
from outboxio.support.log import log_of

logger = log_of(__name__)

T = TypeVar("T")

MAX_CHECK_INTERVAL = 1.0  # seconds between two checks whether an event loop that was blocked for too long runs again


class ThreadedLock:
    """Runs the cluster lock of a dialect in the thread. Methods named ``..._there`` are called in the thread."""

    def __init__(self, inner: ClusterLock, session: BaseLoopConnection, heartbeat: float, longest_block: float) -> None:
        """``session``: the session of ``inner``.

        ``longest_block``: for how many seconds your application's event loop may be blocked without losing the locks.
        """
        self.proof: Proof | None = None
        self._inner = inner
        self._session = session
        self._heartbeat = heartbeat
        self._longest_block = longest_block
        self._lost: Callable[[], None] = _nothing
        self._on_wake: Callable[[str], None] = _ignored
        self._watch: LoopWatch | None = None
        self._failure: Exception | None = None
        self._thread: Background | None = None
        self._turn = asyncio.Lock()
        self._losses = 0
        self._beating: asyncio.Task[None] | None = None

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        return await self._guarded(partial(self._inner.acquire, names))

    async def try_probe(self, name: LockName) -> bool:
        return await self._guarded(partial(self._inner.try_probe, name))

    async def heartbeat(self) -> Proof:
        return await self._guarded(self._prove_there)

    async def release(self, names: Sequence[LockName]) -> None:
        if names and self._watch is not None:
            await self._guarded(partial(self._inner.release, names))

    async def listen(self, on_wake: Callable[[str], None]) -> None:
        """Open the session if needed. Raises the error of the last heartbeat in the thread, if it failed."""
        self._on_wake = on_wake
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not self.is_open:
            await self._guarded(self._open_there)

    def when_lost(self, callback: Callable[[], None]) -> None:
        self._lost = callback

    async def close(self) -> None:
        self._lost, self._on_wake = _nothing, _ignored
        watch, self._watch = self._watch, None
        if watch is None:
            return
        try:
            if not watch.has_ended:
                await watch.thread.run(self._end_there)
        except asyncio.CancelledError:
            self._end_later(watch)
            raise
        except BaseException:
            self._leave(watch)
            raise
        self._leave(watch)

    @property
    def is_open(self) -> bool:
        """True if there is a proof, and the session has not ended since."""
        watch = self._watch
        return self.proof is not None and watch is not None and not watch.has_ended and watch.thread.is_alive

    async def in_thread(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the thread of the session. The locks are kept even if it fails."""
        if self._watch is None:
            raise ConnectionResetError("the session that holds the cluster locks is closed")
        return await self._watch.thread.run(work)

    def terminate(self) -> None:
        """Drop the session and its locks, so that a standby can take over."""
        if (watch := self._watch) is not None:
            watch.thread.soon(self._session.terminate)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work of the lock manager on the session. A failure ends the session and removes the proof."""
        watch = self._enter()
        try:
            return await watch.thread.run(partial(self._guarded_there, work))
        except asyncio.CancelledError:
            # The work may have acquired a lock that the lock manager has not recorded and would never release.
            if self._watch is watch:  # otherwise close() is under way
                self._watch = None
                self._end_later(watch)
            raise

    def _enter(self) -> LoopWatch:
        watch = self._watch
        if watch is None or watch.has_ended or not watch.thread.is_alive:
            watch = self._watch = LoopWatch.enlist()
            watch.on_loop_closed(self._end_there)
            if self._thread is not watch.thread:
                self._thread, self._turn = watch.thread, asyncio.Lock()
                self.proof = self._beating = None
        return watch

    def _end_later(self, watch: LoopWatch) -> None:
        """Let the thread end the session, without waiting for it."""
        if not watch.thread.soon(self._start_ending_there, watch):
            self._leave(watch)

    def _leave(self, watch: LoopWatch) -> None:
        watch.remove_on_loop_closed(self._end_there)
        watch.leave()

    # --- in the thread -------------------------------------------------------------------------

    async def _guarded_there(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            try:
                return await work()
            except BaseException:
                self.proof = None
                raise

    async def _open_there(self) -> None:
        self._inner.when_lost(self._session_over_there)
        await self._inner.listen(self._wake_there)
        if self._beating is None:
            self._beating = asyncio.get_running_loop().create_task(self._keep_beating_there())

    async def _keep_beating_there(self) -> None:
        while True:
            await asyncio.sleep(self._pause())
            watch = self._watch
            if self.proof is None or watch is None:
                continue
            if watch.is_responsive(self._longest_block):
                await self._beat_there(self.proof)
            elif watch.unresponsive_for() >= self._longest_block:
                watch.report_unresponsive()

    def _pause(self) -> float:
        due = SHARE_OF_HEARTBEAT * self._heartbeat
        age = 0.0 if self.proof is None else machine.monotonic() - self.proof.sent_at
        return max(due - age, min(due / 8, MAX_CHECK_INTERVAL))

    async def _beat_there(self, last: Proof) -> None:
        was_silent = machine.monotonic() - last.sent_at >= LONGEST_SILENCE * self._heartbeat
        try:
            await self._guarded_there(self._prove_there)
        except Exception as error:
            # After this long without heartbeats the server ends the session, so the error does not concern the
            # database.
            self._failure = None if was_silent else error
            self._session_over_there()

    async def _prove_there(self) -> Proof:
        proof, losses = self.proof, self._losses
        if proof is None or machine.monotonic() - proof.sent_at >= self._heartbeat / 2:
            proof = await self._inner.heartbeat()
            if losses != self._losses:
                raise ConnectionResetError("the session that holds the cluster locks has ended")
            self.proof = proof
        return proof

    def _wake_there(self, payload: str) -> None:
        self._notify(self._report_wake, payload)

    def _session_over_there(self) -> None:
        self._losses += 1
        self.proof = None
        self._notify(self._report_loss)

    def _start_ending_there(self, watch: LoopWatch) -> None:
        ending = asyncio.get_running_loop().create_task(self._end_there())
        ending.add_done_callback(lambda _: self._ended_there(ending, watch))

    def _ended_there(self, ending: asyncio.Task[None], watch: LoopWatch) -> None:
        if not ending.cancelled() and (error := ending.exception()) is not None:
            logger.debug("ignoring an error while closing the session of a cancelled call: %r", error)
        self._leave(watch)

    async def _end_there(self) -> None:
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            await asyncio.wait((beating,))
        async with self._turn:
            self.proof = None
            await self._inner.close()

    # --- on your application's event loop ------------------------------------------------------

    def _notify(self, callback: Callable[..., None], *args: Any) -> None:
        if (watch := self._watch) is not None:
            call_soon(watch.event_loop, callback, *args)

    def _report_wake(self, payload: str) -> None:
        self._on_wake(payload)

    def _report_loss(self) -> None:
        self._lost()


class ThreadObserver:
    """Reports failures of a session in a thread to the shard's connections, on your application's event loop."""

    def __init__(self, connections: ServerConnections, home: EventLoopGuard) -> None:
        self._connections = connections
        self._home = home

    def opened(self) -> None:
        """Do nothing: the heartbeat of the thread detects failures."""

    def unanswered(self) -> None:
        self._home.call_soon(self._connections.unanswered)

    def not_writable(self, error: Exception, *, is_final: bool) -> Exception:
        if is_final:
            self._home.call_soon(self._connections.drop_all)
        return self._connections.explained(error)


def _nothing() -> None:
    return None


def _ignored(payload: str) -> None:
    return None
