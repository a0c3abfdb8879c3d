"""Bulk orders: everything that matches a filter is retried or skipped, in pieces (decision 44).

Each piece is a transaction that changes up to 1,000 notifications and writes the place that was reached into
``operations``. So a process that goes on after a crash begins right after the last piece, and no notification changes
twice.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from outboxio.model.operating.groups import Search
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.model.redaction import Redact
from outboxio.operations.admin_shards import AdminShard
from outboxio.operations.ordering.recorder import after_error, log_end
from outboxio.operations.ordering.rights import naming_rights
from outboxio.storage.protocols import BulkOrder, Database, Taken

PIECE = 1000  # notifications


class BulkRun:
    """A bulk order on a shard, carried out by this process.

    Example::

        while run.is_ours and not run.operation.has_ended:
            await run.step()
    """

    def __init__(self, namespace: str, one: AdminShard, worker: str, taken: Taken, redact: Redact) -> None:
        """``worker``: the name under which this process has written or taken the operation."""
        self.operation = taken.operation
        """The operation, with the numbers so far."""
        self.is_ours = True
        """False if a second process has taken the operation: this process was silent for too long."""
        self._namespace = namespace
        self._one = one
        self._worker = worker
        self._reached = taken.reached
        self._redact = redact
        search = msgspec.convert(self.operation.request["search"], Search)
        kind: Literal["retry", "skip"] = "retry" if self.operation.kind == "retry" else "skip"
        self._order = BulkOrder(kind, self.operation.id, worker, search)

    @property
    def database(self) -> Database:
        return self._one.database

    async def step(self) -> None:
        """Do a piece, and end the operation after the last piece.

        An error that may pass leaves the operation RUNNING: call the method again, or leave the rest to a different
        process. Any other error ends the operation FAILED.
        """
        try:
            async with naming_rights(self.database, self.operation.kind):
                await self._step()
        except Exception as error:
            database = self.database
            if not (database.is_transient(error) or database.is_unreachable(error)):
                await self._end(after_error(self.operation, error, self._redact))
            raise

    async def stop(self) -> None:
        """End the operation STOPPED, unless the operation has ended or is a different process's."""
        if self.is_ours and not self.operation.has_ended:
            await self._end(replace(self.operation, state=OperationState.STOPPED))

    async def look(self) -> None:
        """Read the operation that a different process carries out."""
        self.operation = await self.database.operations.get(self._namespace, self.operation.id) or self.operation

    async def _step(self) -> None:
        now = self._one.clock()
        piece = await self.database.search.change_piece(self._namespace, self._order, self._reached, PIECE, now)
        if not piece.is_ours:
            await self._lose()
            return
        so_far = self.operation
        self.operation = replace(
            so_far, matched=so_far.matched + piece.matched, done=so_far.done + piece.done,
            refused=so_far.refused + piece.refused, updated_date=now,
        )  # fmt: skip
        self._reached = piece.next
        if piece.done:
            self._one.wake()
        if piece.next is None:
            await self._end(replace(self.operation, state=OperationState.DONE))

    async def _lose(self) -> None:
        """The operation was stopped, or is a different process's now."""
        if await self.database.operations.is_to_stop(self._namespace, self.operation.id):
            await self.stop()
        else:
            self.is_ours = False
            await self.look()

    async def _end(self, operation: Operation) -> None:
        now = self._one.clock()
        ended = replace(operation, updated_date=now, finished_date=now)
        if await self.database.operations.finish(self._namespace, ended, self._worker):
            self.operation = ended
            log_end(ended)
        else:
            self.is_ours = False
            await self.look()
