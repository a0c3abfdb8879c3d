"""The scheduler: which ready run starts next.

The scheduler never waits; workers take runs and hook runs from it. A run starts if its handler is below the limit, and

* a transaction is free for the handler, if the handler works in transactions (``runs/transaction_shares.py``);
* the handler has not used up its share of the workers, or more workers are free than are reserved for handlers.

So a handler can start a run at once, however many runs of slow handlers there are. Handlers take turns; handlers of a
lower priority number come before handlers of a higher priority number.

Code that makes rows ready calls :meth:`Scheduler.call`, which wakes idle workers. One worker is always idle, or about
to begin (``workers.py``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from outboxio.dispatch.state import Shared
from outboxio.runs.handler_queue import HOOKS_AHEAD, HandlerQueue
from outboxio.runs.run import STUCK, HookRun, Run
from outboxio.runs.transaction_shares import Shares, TransactionShare

LONGEST_TURN = 0.2  # seconds that a queue waits for a worker before it precedes queues of higher priority
MOST_CALLED = 8  # workers that are woken at the same time


class Turns:
    """Queues with ready runs. Queues of a lower priority number come first, queues of equal priority take turns.

    A queue that has waited for 0.2 s precedes all queues that have waited for less time, so no queue starves.
    """

    def __init__(self) -> None:
        self._levels: dict[int, deque[HandlerQueue]] = {}

    def __bool__(self) -> bool:
        return any(self._levels.values())

    def append(self, queue: HandlerQueue) -> None:
        queue.listed_at = asyncio.get_running_loop().time()
        level = self._levels.get(queue.spec.priority)
        if level is None:
            level = self._levels[queue.spec.priority] = deque()
            self._levels = dict(sorted(self._levels.items()))
        level.append(queue)

    def popleft(self) -> HandlerQueue:
        levels = [level for level in self._levels.values() if level]
        longest = min(levels, key=lambda level: level[0].listed_at)
        if asyncio.get_running_loop().time() - longest[0].listed_at > LONGEST_TURN:
            return longest.popleft()
        return levels[0].popleft()


class Scheduler:
    """Chooses the next run and the next hook run of a shard, and accounts for workers and transactions."""

    def __init__(self, shared: Shared) -> None:
        queues = shared.queues
        self.hooks_came = False
        """True if hook runs may start that could not start before."""
        self.idle: list[asyncio.Future[bool]] = []
        """A future for each waiting worker; True wakes the worker, False ends it."""
        self.called = 0
        """Workers that were woken and have not resumed yet."""
        self._state = shared.state
        self._concurrency = shared.setup.settings.concurrency
        self.transactions = _divide(shared.setup.database.handler_transactions, queues)
        """The transactions of handlers, hooks and jobs."""
        self._reserved = sum(queue.spec.share for queue in queues)
        """The workers that are reserved for handlers with fewer runs than their share."""
        has_priorities = len({queue.spec.priority for queue in queues}) > 1
        self.runnable: deque[HandlerQueue] | Turns = Turns() if has_priorities else deque()
        """The queues with ready runs."""
        self._short: dict[HandlerQueue, float] = {}
        """The queues that wait for a transaction, each with the time when the wait began."""
        self._held_back: list[HandlerQueue] = []
        """The queues that wait for a worker beyond their share."""
        self._lanes: deque[HandlerQueue] = deque()
        """The queues whose hook lanes have ready hook runs."""

    # --- calling workers -----------------------------------------------------------------------

    def call(self) -> None:
        """Wake idle workers for the runs that are ready."""
        running = self._state.running
        if self.hooks_came or (self.runnable and running < self._concurrency):
            self.wake(min(max(1, running), MOST_CALLED) - self.called)

    def wake(self, number: int) -> int:
        """Wake up to ``number`` idle workers; return how many are missing."""
        while number > 0 and self.idle:
            waiter = self.idle.pop()
            if not waiter.done():
                waiter.set_result(True)
                self.called += 1
                number -= 1
        return number

    def end_idle(self) -> None:
        """End the waiting workers. Busy workers end after their current run."""
        for waiter in self.idle:
            if not waiter.done():
                waiter.set_result(False)

    # --- runs of handlers ----------------------------------------------------------------------

    def enlist(self, queue: HandlerQueue) -> None:
        """Let a queue take turns while it has a run to start."""
        if not queue.is_listed and queue.ready and len(queue.running) < queue.limit:
            queue.is_listed = True
            self.runnable.append(queue)

    def next_run(self) -> Run | None:
        """Take the next run, and count it as running. Return ``None`` if no run may start."""
        runnable, state = self.runnable, self._state
        while runnable and state.running < self._concurrency:
            queue = runnable.popleft()
            queue.is_listed = False
            ready, running, spec = queue.ready, queue.running, queue.spec
            if not ready or len(running) >= queue.limit:
                continue
            gate, claim = queue.quota.gate, queue.claim
            if gate is not None and not gate.may_start():
                continue
            if claim is not None and not self.transactions.may_take(claim):
                self._short.setdefault(queue, queue.listed_at)
                continue
            if len(running) < spec.share:
                self._reserved -= 1
            elif not self._is_worker_free():
                self._held_back.append(queue)
                continue
            if claim is not None:
                self.transactions.take(claim)
            run = ready.popleft() if gate is None else gate.take()
            running[run] = None
            state.ready -= 1
            state.running += 1
            self.enlist(queue)
            ahead = queue.ahead
            if ahead.may_have_more and (
                len(ready) == ahead.window // 2 or (spec.batch is not None and queue.wants_more)
            ):
                state.signals.find.set()
            return run
        return None

    def next_in_place(self, run: Run) -> Run:
        """Take the next run of a queue, replacing a run that has ended."""
        queue, state, ahead = run.queue, self._state, run.queue.ahead
        del queue.running[run]
        state.ended += 1
        run = queue.ready.popleft()
        queue.running[run] = None
        state.ready -= 1
        if ahead.may_have_more and len(queue.ready) == ahead.window // 2:
            state.signals.find.set()
        return run

    def _is_worker_free(self) -> bool:
        """Return True if a worker is free for a handler that has used up its share."""
        free = self._concurrency - self._state.running
        return free > min(self._reserved, self._concurrency // 2)

    def leave(self, run: Run) -> None:
        """Account for a run of a handler that ended or was abandoned as stuck."""
        queue, state = run.queue, self._state
        del queue.running[run]
        state.running -= 1
        state.ended += run.phase is not STUCK
        running = len(queue.running)
        if running < queue.spec.share:
            self._reserved += 1
        if running == queue.quota.gives_back_at:
            state.signals.locks.set()
        if queue.claim is not None and not run.abandoned:
            self.release(run)
        if not queue.is_listed:
            self.enlist(queue)
        while self._held_back:
            self.enlist(self._held_back.pop())
        if not state.running and not state.ready:
            state.set_if_quiet()

    def release(self, run: Run) -> None:
        """Release the transaction of a run. Queues that wait for a transaction come first, in order.

        A stuck run keeps the connection, and so the transaction, until the handler ends.
        """
        claim = run.queue.hook_lane.claim if isinstance(run, HookRun) else run.queue.claim
        if claim is not None:
            self.release_share(claim)

    def release_share(self, claim: TransactionShare) -> None:
        """Release a transaction of a share."""
        self.transactions.release(claim)
        self.hooks_came |= bool(self._lanes)
        short, self._short = self._short, {}
        for queue, since in short.items():
            self.enlist(queue)
            queue.listed_at = since

    # --- runs of hooks -------------------------------------------------------------------------

    def add_hook(self, run: HookRun) -> None:
        """Make a hook run ready. Hook runs need no worker: each needs a transaction, and transactions are few."""
        run.queue.hook_lane.ready.append(run)
        self._state.ready += 1
        self._state.quiet.clear()
        self.hooks_came = True
        self._list_lane(run.queue)

    def next_hook(self) -> HookRun | None:
        """Take the next hook run, of each handler in turn; ``None`` if no hook run may start."""
        for _ in range(len(self._lanes)):
            queue = self._lanes.popleft()
            queue.hook_lane.is_listed = False
            run = self._next_of(queue)
            self._list_lane(queue)
            if run is not None:
                return run
        return None

    def _next_of(self, queue: HandlerQueue) -> HookRun | None:
        lane, state = queue.hook_lane, self._state
        assert lane.claim is not None
        if not lane.ready or len(lane.running) >= lane.limit or not self.transactions.take(lane.claim):
            return None
        run = lane.ready.popleft()
        lane.running[run] = None
        state.ready -= 1
        state.hooks += 1
        if queue.ahead.may_have_more and len(lane.ready) == HOOKS_AHEAD:
            state.signals.find.set()
        return run

    def _list_lane(self, queue: HandlerQueue) -> None:
        lane = queue.hook_lane
        if lane.ready and not lane.is_listed:
            lane.is_listed = True
            self._lanes.append(queue)

    def leave_hook(self, run: HookRun) -> None:
        """Account for a hook run that ended or was abandoned as stuck."""
        del run.queue.hook_lane.running[run]
        self._state.hooks -= 1
        self._state.ended += run.phase is not STUCK
        self.hooks_came |= bool(self._lanes)
        if not run.abandoned:
            self.release(run)
        self._state.set_if_quiet()


class JobTransactions:
    """The transactions of jobs, which share those of the handlers of the shard."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._claim: TransactionShare | None = None
        """The share of all jobs; ``None`` before the first job."""

    def take(self) -> bool:
        """Take a transaction for a job; False if none is free for jobs."""
        if self._claim is None:
            self._claim = self._scheduler.transactions.of_jobs()
        return self._scheduler.transactions.take(self._claim)

    def release(self) -> None:
        """Release the transaction of a job, for which a handler may be waiting."""
        assert self._claim is not None
        self._scheduler.release_share(self._claim)
        self._scheduler.call()


def _divide(transactions: int, queues: Sequence[HandlerQueue]) -> Shares:
    """Give each transactional handler, and the hooks of each handler, a share of the transactions."""
    transactional = [queue for queue in queues if queue.spec.needs_transaction]
    hooks = sum(bool(queue.spec.hooks) for queue in queues)
    shares = Shares(transactions, handlers=len(transactional), hooks=hooks)
    for queue in transactional:
        queue.claim = shares.of_handler()
    for queue in queues:
        queue.hook_lane.claim = shares.of_hook(is_expected=bool(queue.spec.hooks))
    return shares
