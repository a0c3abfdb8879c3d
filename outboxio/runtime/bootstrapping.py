"""The part of an outbox that populates a new handler: ``Outbox.bootstrap``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outboxio.actions.executor import ActionExecutor, refuse_in_transaction
from outboxio.model.snapshot import SnapshotRows, ToEvent

if TYPE_CHECKING:
    from outboxio.model.operating.operation import Operation
    from outboxio.operations.admin import Admin


class Bootstrapping:
    """The base class of :class:`~outboxio.Outbox` that populates new handlers."""

    admin: Any
    executor: ActionExecutor

    async def bootstrap(
        self,
        handler: str,
        rows: SnapshotRows,
        to_event: ToEvent,
        *,
        key: str | Sequence[str],
        chunk: int = 500,
        shard: str | None = None,
        again: bool = False,
    ) -> Operation:
        """Send a handler one event per existing row, while other transactions write. Returns the recorded operation.

        ``handler``: the name of a handler or relay that is registered here; no other handler gets the events.
        ``rows`` is an async function of ``(tx, after, limit)``: it returns up to ``limit`` rows with a key greater than
        ``after`` (``None`` at first), ordered by the key, and locks them in share mode (``FOR SHARE``; SQLite
        needs no lock). ``key`` is a unique column, or several: then ``after`` is a tuple. ``to_event`` returns the
        event of a row, a :class:`Snapshot`, or ``None`` to skip the row.

        Each chunk of up to ``chunk`` rows is a transaction that also writes the position, so a call after a crash, an
        error or ``admin.stop`` resumes there. Of several concurrent calls, one does the work and the others wait for
        it. Once the bootstrap has finished, a call returns the finished operation and emits nothing; ``again=True``
        starts over. Waits while the handler has 5,000 unfinished notifications. The events of a change that commits
        after a chunk has read its row follow the row's event, also in an ordered handler.

        Raises :class:`UnknownHandler`, :class:`ConfigurationError` for rows out of order, for a key column that is
        missing, NULL or of a type that the position cannot hold, and for an event that the handler does not handle,
        :class:`InvalidEvent` for an event that cannot be stored, and the errors of ``rows`` and ``to_event``. In these
        cases nothing of the chunk is written, and the operation is FAILED. Raises :class:`SelfDeadlock` inside a
        transaction.

        Example::

            async def rows(tx: Transaction, after: int | None, limit: int) -> list[Any]:
                query = "SELECT id, state FROM orders WHERE id > $1 ORDER BY id LIMIT $2 FOR SHARE"
                return await tx.fetch(query, after or 0, limit)

            await outbox.bootstrap("order-view", rows, lambda row: OrderChanged(row["id"], row["state"]), key="id")
        """
        refuse_in_transaction(self, "outbox.bootstrap()", "call it outside of transactions: each chunk is one")
        from outboxio.operations.bootstrapping import Bootstrap, checked_call

        admin: Admin = self.admin
        call = checked_call(handler, rows, to_event, key, chunk, again)
        return await Bootstrap(admin, self.executor, call, shard).run()
