"""Operations: the recorded orders of operators."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from msgspec import Struct


class OperationState(StrEnum):
    """The life of an operation. All states but RUNNING are ends."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    STOPPED = "STOPPED"
    """An operator has stopped the operation. The pieces that were done stay done."""
    FAILED = "FAILED"


class Operation(Struct, frozen=True, kw_only=True):
    """An order of an operator: a row of ``operations``, or the answer to a dry run, which writes no row."""

    id: UUID
    kind: str
    """The order: ``retry``, ``skip``, ``resume``, ``replay``, ``backfill``, ``pause``, ``unpause``, ``purge``,
    ``unsubscribe``, ``partitions``, ``pause_job``, ``unpause_job``, ``run_job_now``, ``remove_job``."""
    state: OperationState
    matched: int
    """The notifications that the filter has matched so far; all of them in the state DONE."""
    done: int
    """The notifications that the order has changed."""
    refused: int
    """The matched notifications that the order cannot change, such as a notification that has succeeded."""
    request: dict[str, object]
    """The filter and the other arguments."""
    actor: str
    origin: str
    """The place of the order: ``code``, ``cli``, ``dashboard``."""
    reason: str | None
    created_date: datetime
    updated_date: datetime
    finished_date: datetime | None
    error: str | None
    shard: str
    """The name of the shard; of an order on several shards, the names with commas."""
    is_dry_run: bool = False
    is_complete: bool = True
    """False if ``matched`` of a dry run is the bound of a count: there are more matches, or there may be."""

    @property
    def has_ended(self) -> bool:
        """True unless the operation is RUNNING."""
        return self.state is not OperationState.RUNNING
