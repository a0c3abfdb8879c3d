"""A cluster lock whose session lives in a thread, so that a blocked event loop does not lose the lock.

The session, LISTEN and the heartbeat run on the event loop of a thread (``loops/owner.py``). The application's
event loop sends the lock's work to the thread, and can read the last proof at any time, also right after a block. The
thread sends heartbeats only while the application's event loop runs, or has stood still for at most the longest run of
a handler, because a process that never continues must not keep its locks. After that time the server ends the silent
session, and a standby takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from outboxio.loops.owner import Background, EventLoopGuard, call_soon
from outboxio.loops.standstill import LoopWatch
from outboxio.model.lock_name import LockName
from outboxio.storage.connections.driver import Proof
from outboxio.storage.connections.health import Connections
from outboxio.storage.connections.loop_connection import BaseLoopConnection
from outboxio.storage.protocols import LONGEST_SILENCE, SHARE_OF_HEARTBEAT, ClusterLock, LockGrant
from outboxio.support import machine
from outboxio.support.log import log_of

logger = log_of(__name__)

T = TypeVar("T")

LONGEST_LOOK = 1.0  # seconds between two checks if an event loop that stood still for too long runs again


class ThreadedLock:
    """Runs a dialect's cluster lock in the thread. Methods that end with ``_there`` are called in the thread."""

    def __init__(self, inner: ClusterLock, session: BaseLoopConnection, heartbeat: float, longest_block: float) -> None:
        """``session``: the session of ``inner``.

        ``longest_block``: the seconds for which the application's event loop may stand still without losing the locks.
        """
        self.proof: Proof | None = None
        self._inner = inner
        self._session = session
        self._heartbeat = heartbeat
        self._longest_block = longest_block
        self._lost: Callable[[], None] = _nothing
        self._heard: Callable[[str], None] = _ignored
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

    async def listen(self, heard: Callable[[str], None]) -> None:
        """Open the session if needed. Raises the error of the thread's last heartbeat, if that heartbeat failed."""
        self._heard = heard
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not self.is_open:
            await self._guarded(self._open_there)

    def when_lost(self, callback: Callable[[], None]) -> None:
        self._lost = callback

    async def close(self) -> None:
        self._lost, self._heard = _nothing, _ignored
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
        """True if a proof exists, and no end of the session was reported since."""
        watch = self._watch
        return self.proof is not None and watch is not None and not watch.has_ended and watch.thread.is_alive

    async def in_thread(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` in the thread of the session. A failure says nothing about the locks."""
        if self._watch is None:
            raise ConnectionResetError("the session that holds the cluster locks is closed")
        return await self._watch.thread.run(work)

    def terminate(self) -> None:
        """Drop the session: the locks are lost, and a standby may take them."""
        if (watch := self._watch) is not None:
            watch.thread.soon(self._session.terminate)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work of the lock manager on the session. A failure ends the session and removes the proof."""
        watch = self._enter()
        try:
            return await watch.thread.run(partial(self._guarded_there, work))
        except asyncio.CancelledError:
            # The work may have taken a lock that the lock manager does not know, and that the thread would keep for
            # ever.
            if self._watch is watch:  # otherwise close() is under way
                self._watch = None
                self._end_later(watch)
            raise

    def _enter(self) -> LoopWatch:
        watch = self._watch
        if watch is None or watch.has_ended or not watch.thread.is_alive:
            watch = self._watch = LoopWatch.enlist()
            watch.at_farewell(self._end_there)
            if self._thread is not watch.thread:
                self._thread, self._turn = watch.thread, asyncio.Lock()
                self.proof = self._beating = None
        return watch

    def _end_later(self, watch: LoopWatch) -> None:
        """Let the thread end the session, without waiting."""
        if not watch.thread.soon(self._begin_to_end_there, watch):
            self._leave(watch)

    def _leave(self, watch: LoopWatch) -> None:
        watch.no_farewell(self._end_there)
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
        await self._inner.listen(self._hear_there)
        if self._beating is None:
            self._beating = asyncio.get_running_loop().create_task(self._keep_beating_there())

    async def _keep_beating_there(self) -> None:
        while True:
            await asyncio.sleep(self._pause())
            watch = self._watch
            if self.proof is None or watch is None:
                continue
            if watch.goes_on(self._longest_block):
                await self._beat_there(self.proof)
            elif watch.silence() >= self._longest_block:
                watch.tell_silence()

    def _pause(self) -> float:
        due = SHARE_OF_HEARTBEAT * self._heartbeat
        age = 0.0 if self.proof is None else machine.monotonic() - self.proof.sent_at
        return max(due - age, min(due / 8, LONGEST_LOOK))

    async def _beat_there(self, last: Proof) -> None:
        was_silent = machine.monotonic() - last.sent_at >= LONGEST_SILENCE * self._heartbeat
        try:
            await self._guarded_there(self._prove_there)
        except Exception as error:
            # The server ends a session after so long a silence: the error says nothing about the database.
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

    def _hear_there(self, payload: str) -> None:
        self._tell(self._pass_on, payload)

    def _session_over_there(self) -> None:
        self._losses += 1
        self.proof = None
        self._tell(self._pass_on_loss)

    def _begin_to_end_there(self, watch: LoopWatch) -> None:
        ending = asyncio.get_running_loop().create_task(self._end_there())
        ending.add_done_callback(lambda _: self._ended_there(ending, watch))

    def _ended_there(self, ending: asyncio.Task[None], watch: LoopWatch) -> None:
        if not ending.cancelled() and (error := ending.exception()) is not None:
            logger.debug("a session whose work was cancelled ended in disorder: %r", error)
        self._leave(watch)

    async def _end_there(self) -> None:
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            await asyncio.wait((beating,))
        async with self._turn:
            self.proof = None
            await self._inner.close()

    # --- on the application's event loop -------------------------------------------------------

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        if (watch := self._watch) is not None:
            call_soon(watch.home, callback, *args)

    def _pass_on(self, payload: str) -> None:
        self._heard(payload)

    def _pass_on_loss(self) -> None:
        self._lost()


class TroublesOfThread:
    """Reports the failures of a session in a thread to the shard's connections, in the application's event loop."""

    def __init__(self, connections: Connections, home: EventLoopGuard) -> None:
        self._connections = connections
        self._home = home

    def opened(self) -> None:
        """Nothing to watch: the thread has a heartbeat."""

    def unanswered(self) -> None:
        self._home.call_soon(self._connections.unanswered)

    def does_not_write(self, error: Exception, *, gives_up: bool) -> Exception:
        if gives_up:
            self._home.call_soon(self._connections.give_up_all)
        return self._connections.explained(error)


def _nothing() -> None:
    return None


def _ignored(payload: str) -> None:
    return None
