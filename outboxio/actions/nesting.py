"""Refusing calls that would wait for themselves: the handler or transaction around the call has to end first.

Context variables show the handler and the transactions around a call. A task inherits the context variables of the
spawning task. A call in such a task is refused until the handler or the transaction has ended, because the handler may
be waiting for the task, as in ``asyncio.wait_for``. A task that outlives its handler is free.

Only calls of the same outbox are refused: a handler of an outbox may drain a second outbox.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from outboxio.errors import WaitsForItself
from outboxio.model.envelope import handler_around, leave_handlers
from outboxio.support.machine import in_forked_children
from outboxio.transaction import transactions_around


def refuse_in_handler(outbox: object, call: str, remedy: str) -> None:
    """Raise :class:`WaitsForItself` inside a handler of this outbox that has not ended."""
    envelope = handler_around(outbox)
    if envelope is not None:
        raise WaitsForItself(call, f"handler {envelope.handler_name!r}", remedy)


def refuse_in_transaction(outbox: object, call: str, remedy: str, shards: Collection[str] | None = None) -> None:
    """Raise :class:`WaitsForItself` inside an open transaction of this outbox, on ``shards`` or on any shard."""
    for tx in transactions_around():
        if tx.owner is outbox and (shards is None or tx.shard in shards):
            raise WaitsForItself(call, f"the transaction of {tx.action_name}", remedy)


def refuse_claimed(call: str, ids: Collection[UUID]) -> None:
    """Raise :class:`WaitsForItself` for rows that a transaction around this call has locked, of any outbox."""
    for tx in transactions_around():
        for claimed in tx.claimed.intersection(ids):
            raise WaitsForItself(
                f"{call} of notification {claimed}",
                f"the transaction of handler {tx.action_name!r}, which has locked its row,",
                "raise an error to have it run again (RetryAfter says when, Unprocessable that it never is), or return "
                "to have done with it",
            )


def refuse_in_claiming_transaction(call: str) -> None:
    """Raise :class:`WaitsForItself` if a transaction around this call has locked rows, which ``call`` may wait for."""
    for tx in transactions_around():
        if tx.claimed:
            raise WaitsForItself(
                call,
                f"the transaction of handler {tx.action_name!r}, which has locked its row,",
                "give the order with background=True, or after the transaction has ended",
            )


def _begin_child() -> None:
    """The handler and the transactions around a fork go on in the parent. In the child they are over."""
    for tx in transactions_around():
        tx.abandon()
    leave_handlers()


in_forked_children(_begin_child)
