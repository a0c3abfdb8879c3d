"""Errors about misused transactions, conflicting actions and unknown commits."""

from __future__ import annotations

from uuid import UUID

from outboxio.errors.configuration import OutboxError


class SelfDeadlock(OutboxError):
    """A call inside a handler or a transaction would wait for that handler or transaction to end. It was refused.

    ``call`` is the refused call, ``inside`` the enclosing handler or transaction: for example, ``drain()`` inside a
    handler of the same outbox.
    """

    def __init__(self, call: str, inside: str, fix: str) -> None:
        self.call = call
        self.inside = inside
        super().__init__(f"{call} inside {inside} would deadlock: {fix}")


class TransactionError(OutboxError):
    """A transaction was misused."""


class NestedExecute(TransactionError):
    """``execute`` was called inside ``perform`` or inside ``outbox.connection()``."""

    def __init__(self, outer: str, inner: str, *, in_handler: bool = False, is_reading: bool = False) -> None:
        self.outer = outer
        self.inner = inner
        if is_reading:
            super().__init__(f"execute({inner}) inside {outer}: execute the action after the block has ended")
            return
        fix = (
            f"Use envelope.execute({inner}), which joins the transaction"
            if in_handler
            else f"Emit an event in {outer}, and let a handler of that event execute {inner}"
        )
        super().__init__(
            f"execute({inner}) inside the transaction of {outer}: it would commit separately, even if {outer} fails. "
            f"{fix}"
        )


class NestedConnection(TransactionError):
    """``outbox.connection()`` was called inside a transaction of the outbox on the same shard."""

    def __init__(self, outer: str, *, in_handler: bool = False, is_reading: bool = False) -> None:
        self.outer = outer
        if is_reading:
            super().__init__(f"{outer} inside {outer}: use the connection that is already open")
            return
        tx = "envelope.tx" if in_handler else "tx"
        super().__init__(
            f"outbox.connection() inside the transaction of {outer}: it would not see the writes of {outer}. Read "
            f"through {tx}, as in {tx}.fetch(...)"
        )


class NoHandlerTransaction(TransactionError):
    """``envelope.tx`` was used in a handler that has no transaction."""

    def __init__(self, handler_name: str) -> None:
        self.handler_name = handler_name
        super().__init__(
            f'handler {handler_name!r} has no transaction: register it with delivery="transactional"; its writes '
            "through envelope.tx then commit together with its delivery"
        )


class TransactionClosed(TransactionError):
    """``tx`` was used after the action had ended."""

    def __init__(self, action_name: str) -> None:
        self.action_name = action_name
        super().__init__(
            f"the transaction of {action_name} has ended; use tx only inside perform (or the async with block), "
            "and await everything that uses it there"
        )


class ConcurrentUse(TransactionError):
    """Two tasks used the same ``tx`` at the same time."""

    def __init__(self, action_name: str) -> None:
        self.action_name = action_name
        super().__init__(
            f"the transaction of {action_name} is in use by another statement: a connection runs one statement at a "
            "time; await statements one after the other, not with gather() or a task group"
        )


class TransactionEnded(TransactionError):
    """A statement ended the transaction of an action, or was refused because it would have."""

    def __init__(self, action_name: str, statement: str) -> None:
        self.action_name = action_name
        self.statement = statement
        super().__init__(
            f"{statement!r} ends the transaction of {action_name}; outboxio commits when perform returns and rolls "
            "back when it raises. Use a savepoint for a part that is allowed to fail"
        )


class NoTransaction(TransactionError):
    """Events were recorded on a connection without an open transaction."""

    def __init__(self, connection: object) -> None:
        super().__init__(
            f"recording events needs a connection with an open transaction, and {type(connection).__name__} has none: "
            "the events would be committed separately from your rows. Begin a transaction first, or turn autocommit off"
        )


class StaleRecord(OutboxError):
    """A concurrent transaction changed a row that the action had read. By default, the action is retried 3 times."""

    def __init__(self, model_type: str, model_id: object = None, version: object = None) -> None:
        self.model_type = model_type
        self.model_id = model_id
        self.version = version
        subject = model_type if model_id is None else f"{model_type} {model_id}"
        change = "has changed since it was read" if version is None else f"is no longer at version {version}"
        super().__init__(f"{subject} {change}, or does not exist")


class CommitUnknown(OutboxError):
    """The connection was lost during COMMIT, so the action may or may not be committed. It is never retried.

    Search the table ``events`` for ``action_id``: a committed action has rows there.
    """

    def __init__(self, action_name: str, action_id: UUID) -> None:
        self.action_name = action_name
        self.action_id = action_id
        super().__init__(
            f"the connection was lost during COMMIT of {action_name}, which may have been committed. Look for "
            f"action_id = '{action_id}' in events before running it again"
        )
