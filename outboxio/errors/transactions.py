"""Errors about the use of transactions, and about actions that conflict or may have committed."""

from __future__ import annotations

from uuid import UUID

from outboxio.errors.configuration import OutboxError


class WaitsForItself(OutboxError):
    """A call inside a handler or a transaction would wait for the end of the handler or transaction. It was refused.

    ``call`` is the call, ``inside`` the place: ``drain()`` inside a handler of the same outbox, for example.
    """

    def __init__(self, call: str, inside: str, remedy: str) -> None:
        self.call = call
        self.inside = inside
        super().__init__(f"{call} inside {inside} would wait until that has ended, and so for itself: {remedy}")


class TransactionError(OutboxError):
    """A transaction was misused."""


class NestedExecute(TransactionError):
    """``execute`` was called inside ``perform`` or inside ``outbox.connection()``."""

    def __init__(self, outer: str, inner: str, *, in_handler: bool = False, is_reading: bool = False) -> None:
        self.outer = outer
        self.inner = inner
        if is_reading:
            super().__init__(f"execute({inner}) inside {outer}: let the block that reads end first, then execute")
            return
        remedy = (
            f"Use envelope.execute({inner}), which joins the transaction"
            if in_handler
            else f"Emit an event in {outer}, and let a handler of that event execute {inner}"
        )
        super().__init__(
            f"execute({inner}) inside the transaction of {outer}: it would commit on its own, even if {outer} fails. "
            f"{remedy}"
        )


class NestedConnection(TransactionError):
    """``outbox.connection()`` was called inside a transaction of the outbox on the same shard."""

    def __init__(self, outer: str, *, in_handler: bool = False, is_reading: bool = False) -> None:
        self.outer = outer
        if is_reading:
            super().__init__(f"{outer} inside {outer}: read on the connection that is open already")
            return
        tx = "envelope.tx" if in_handler else "tx"
        super().__init__(
            f"outbox.connection() inside the transaction of {outer}: it would not see what {outer} has written. Read "
            f"through {tx}, as in {tx}.fetch(...)"
        )


class NoHandlerTransaction(TransactionError):
    """A handler without a transaction has used ``envelope.tx``."""

    def __init__(self, handler_name: str) -> None:
        self.handler_name = handler_name
        super().__init__(
            f'handler {handler_name!r} has no transaction: register it with delivery="transactional", and what it '
            "writes through envelope.tx commits together with its delivery"
        )


class TransactionClosed(TransactionError):
    """``tx`` was used after the end of the action."""

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
            f"the transaction of {action_name} is in use by another statement: one connection runs one statement at "
            "a time; await them one after the other, not with gather() or a task group"
        )


class TransactionEnded(TransactionError):
    """A statement has ended the transaction of an action, or was refused as such a statement."""

    def __init__(self, action_name: str, statement: str) -> None:
        self.action_name = action_name
        self.statement = statement
        super().__init__(
            f"{statement!r} ends the transaction of {action_name}; outboxio commits when perform returns and rolls "
            "back when it raises. Use a savepoint for a part that may fail"
        )


class NoTransaction(TransactionError):
    """The connection on which events should be recorded has no open transaction."""

    def __init__(self, connection: object) -> None:
        super().__init__(
            f"recording events needs a connection with an open transaction, and {type(connection).__name__} has none: "
            "they would be committed apart from your own rows. Begin a transaction first, or turn autocommit off"
        )


class StaleRecord(OutboxError):
    """A concurrent transaction has changed a row that the action has read. By default, 3 retries follow."""

    def __init__(self, model_type: str, model_id: object = None, version: object = None) -> None:
        self.model_type = model_type
        self.model_id = model_id
        self.version = version
        subject = model_type if model_id is None else f"{model_type} {model_id}"
        change = "was changed since it was read" if version is None else f"is no longer at version {version}"
        super().__init__(f"{subject} {change}, or does not exist")


class CommitUnknown(OutboxError):
    """The connection was lost during COMMIT, so the action may be committed or not. The action is never retried.

    Search the table ``events`` for ``action_id``: a committed action has rows there.
    """

    def __init__(self, action_name: str, action_id: UUID) -> None:
        self.action_name = action_name
        self.action_id = action_id
        super().__init__(
            f"the connection was lost during COMMIT of {action_name}; it may have been committed. Look for "
            f"action_id = '{action_id}' in events before you run it again"
        )
