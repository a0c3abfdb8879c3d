"""Transactions of jobs: jobs take transactions from the same shares as the handlers of the shard."""

from __future__ import annotations

from outboxio.dispatch.scheduler import Scheduler
from outboxio.dispatch.workers import WorkerPool
from outboxio.runs.transaction_shares import Claim


class JobTransactions:
    """The transactions in which jobs of a shard work."""

    def __init__(self, scheduler: Scheduler, workers: WorkerPool) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._claim: Claim | None = None
        """The claim of all jobs; ``None`` before the first job."""

    def take(self) -> bool:
        """Take a transaction for a job; False if none is free for jobs."""
        if self._claim is None:
            self._claim = self._scheduler.transactions.of_jobs()
        return self._scheduler.transactions.take(self._claim)

    def give_back(self) -> None:
        """Give back the transaction of a job, which a handler may have waited for."""
        assert self._claim is not None
        self._scheduler.give_back_of(self._claim)
        self._workers.start_next()
