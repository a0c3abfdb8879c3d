"""Every error that outboxio raises on its own account.

Each error carries its data as attributes and builds its message from them: the message says the
value that was wrong and what to do about it. Errors of a database driver are translated at the
border (``storage/``) and chained, so ``__cause__`` is always the driver's own exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outboxio.passwords import without_passwords


class OutboxError(Exception):
    """The root of everything that outboxio raises on its own account."""


# --- configuration ---------------------------------------------------------------------------


class ConfigurationError(OutboxError):
    """Something in the set-up is wrong; nothing was started and nothing was written."""


class SettingsError(ConfigurationError):
    """A setting is unknown, or its value is not what is expected."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        self.key = key
        self.value = value
        self.expected = expected
        super().__init__(f"setting {key} = {without_passwords(repr(value))}: expected {expected}")


class RegistrationError(ConfigurationError):
    """A handler or an event class cannot be registered."""


class PoolTooSmall(ConfigurationError):
    """A connection pool that was handed in cannot hold the lock, the loops and one action."""

    def __init__(self, shard: str, size: int, needed: int, option: str) -> None:
        self.shard = shard
        self.size = size
        self.needed = needed
        super().__init__(
            f"the pool of shard {shard!r} holds at most {size} connections, but the cluster lock, the loops and "
            f"one action need {needed}: give it {option}={needed} or more, or give a URL instead of a pool"
        )


class SameDatabase(ConfigurationError):
    """Two shards reach one eventlog, so each of their events would be handled by both."""

    def __init__(self, first: str, second: str) -> None:
        self.first = first
        self.second = second
        super().__init__(
            f"shards {first!r} and {second!r} reach the same eventlog; every shard needs a database of its own"
        )


class PooledConnection(ConfigurationError):
    """The connection for locks and LISTEN goes through a proxy that shares server sessions."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        super().__init__(
            f"shard {shard!r} is reached through a transaction-pooling proxy: two connections share one server "
            "session, which breaks session locks and LISTEN; give the shard as "
            "Shard(url, direct_url=...) with a direct_url that reaches the server itself"
        )


# --- schema ----------------------------------------------------------------------------------


class SchemaError(OutboxError):
    """The tables are not what this version of outboxio needs."""


class SchemaMissing(SchemaError):
    """Tables, columns or indexes are missing."""

    def __init__(self, shard: str, missing: Sequence[str], files: Sequence[str]) -> None:
        self.shard = shard
        self.missing = tuple(missing)
        self.files = tuple(files)
        super().__init__(
            f"the database of shard {shard!r} lacks {', '.join(missing)}: call `await outbox.migrate()`, run "
            f"`outboxio migrate`, or apply {', '.join(files)}"
        )


class SchemaNewer(SchemaError):
    """The schema was written by a newer outboxio than this one."""

    def __init__(self, shard: str, found: int, known: int) -> None:
        self.shard = shard
        self.found = found
        self.known = known
        super().__init__(
            f"the schema of shard {shard!r} is at version {found}, this outboxio knows versions up to {known}: "
            "upgrade outboxio in this process"
        )


class SchemaOccupied(SchemaError):
    """A table of ours is there already, made by somebody else and not complete."""

    def __init__(self, shard: str, missing: Sequence[str]) -> None:
        self.shard = shard
        self.missing = tuple(missing)
        super().__init__(
            f"the database of shard {shard!r} has eventlog tables that outboxio did not make and never edits; they "
            f"lack {', '.join(missing)}: add those by hand (see sql/), then migrate again"
        )


# --- what is written ---------------------------------------------------------------------------


class InvalidEvent(OutboxError):
    """An event, its parameters or its names cannot be stored; nothing was written.

    ``subject`` names what was refused (``"event MoneyDeposited"``), ``reason`` says why.
    """

    def __init__(self, subject: str, reason: str) -> None:
        self.subject = subject
        self.reason = reason
        super().__init__(f"{subject}: {reason}")


class AmbiguousTypeName(InvalidEvent):
    """Two different classes share one event type name."""

    def __init__(self, name: str, first: type, second: type) -> None:
        self.name = name
        self.first = first
        self.second = second
        super().__init__(
            f"event type {name!r}",
            f"{_where(first)} and {_where(second)} share this name, so their rows could not be told apart; "
            f'give one of them another: class {second.__name__}(Event, type_name="...")',
        )


class TooManyHops(OutboxError):
    """A chain of events that cause events is longer than ``max_hops``."""

    def __init__(self, hops: int, max_hops: int, handler_name: str) -> None:
        self.hops = hops
        self.max_hops = max_hops
        self.handler_name = handler_name
        super().__init__(
            f"handler {handler_name!r} would cause hop {hops} of one chain of events; max_hops is {max_hops}. "
            "Two handlers probably cause each other's events; break the circle, or raise max_hops"
        )


# --- transactions --------------------------------------------------------------------------------


class TransactionError(OutboxError):
    """A transaction was used in a way that it cannot be."""


class NestedExecute(TransactionError):
    """``execute`` was called inside ``perform``."""

    def __init__(self, outer: str, inner: str, *, in_handler: bool = False) -> None:
        self.outer = outer
        self.inner = inner
        remedy = (
            f"Use envelope.execute({inner}), which joins the transaction"
            if in_handler
            else f"Emit an event in {outer}, and let a handler of that event execute {inner}"
        )
        super().__init__(
            f"execute({inner}) inside the transaction of {outer}: it would commit on its own, even if {outer} fails. "
            f"{remedy}"
        )


class NoHandlerTransaction(TransactionError):
    """``envelope.tx`` was asked for in a handler that has none."""

    def __init__(self, handler_name: str) -> None:
        self.handler_name = handler_name
        super().__init__(
            f'handler {handler_name!r} has no transaction: register it with delivery="transactional", and what it '
            "writes through envelope.tx commits together with its delivery"
        )


class TransactionClosed(TransactionError):
    """``tx`` was used after its action ended."""

    def __init__(self, action_name: str) -> None:
        self.action_name = action_name
        super().__init__(
            f"the transaction of {action_name} has ended; use tx only inside perform (or the async with block), "
            "and await everything that uses it there"
        )


class ConcurrentUse(TransactionError):
    """Two tasks used one ``tx`` at the same time."""

    def __init__(self, action_name: str) -> None:
        self.action_name = action_name
        super().__init__(
            f"the transaction of {action_name} is in use by another statement: one connection runs one statement at "
            "a time; await them one after the other, not with gather() or a task group"
        )


class TransactionEnded(TransactionError):
    """A statement ended the action's transaction, or would have."""

    def __init__(self, action_name: str, statement: str) -> None:
        self.action_name = action_name
        self.statement = statement
        super().__init__(
            f"{statement!r} ends the transaction of {action_name}; outboxio commits when perform returns and rolls "
            "back when it raises. Use a savepoint for a part that may fail"
        )


class InterruptedRun(OutboxError):
    """A handler that may run only once had begun before, and nobody knows how far it came."""

    def __init__(self, handler_name: str) -> None:
        self.handler_name = handler_name
        super().__init__(
            f"a run of handler {handler_name!r} was begun before and never ended: its process died, or lost its "
            "database. It runs at most once, so it is not begun again; look at what it did, then retry or skip it"
        )


class CrashedProcess(OutboxError):
    """Runs of a handler for one event never ended, because their process did; it is not begun once more."""

    def __init__(self, handler_name: str, starts: int) -> None:
        self.handler_name = handler_name
        self.starts = starts
        super().__init__(
            f"handler {handler_name!r} was begun {starts} times for this event, at last with no other run beside it, "
            "and each time its process ended before it did. It is not begun again: find out what ends the process "
            "(os._exit, a fault in native code, no memory left), mend it, then retry or skip the notification"
        )


class NoTransaction(TransactionError):
    """``record`` was given a connection on which no transaction is open."""

    def __init__(self, connection: object) -> None:
        super().__init__(
            f"record() needs a connection with an open transaction, {type(connection).__name__} has none: the events "
            "would be committed apart from your own rows. Begin a transaction first"
        )


class StaleRecord(OutboxError):
    """A row was changed by somebody else since it was read. The action is run again by default."""

    def __init__(self, model_type: str, model_id: object = None, version: object = None) -> None:
        self.model_type = model_type
        self.model_id = model_id
        self.version = version
        super().__init__(f"{model_type} {model_id} is no longer at version {version}, or does not exist")


class CommitUnknown(OutboxError):
    """The connection was lost while COMMIT was under way: the action may or may not be committed.

    Never retried. Look for ``action_id`` in ``events`` to find out: the rows of a committed action are there.
    """

    def __init__(self, action_name: str, action_id: UUID) -> None:
        self.action_name = action_name
        self.action_id = action_id
        super().__init__(
            f"the connection was lost during COMMIT of {action_name}; it may have been committed. Look for "
            f"action_id = '{action_id}' in events before you run it again"
        )


# --- databases -----------------------------------------------------------------------------------


class DatabaseError(OutboxError):
    """The database, or the way to it, failed. ``__cause__`` is the driver's exception."""


class DatabaseUnavailable(DatabaseError):
    """A database cannot be reached."""

    def __init__(self, shard: str, where: str, reason: str) -> None:
        self.shard = shard
        self.where = where
        self.reason = reason
        super().__init__(f"shard {shard!r} at {where} cannot be reached: {reason}")


class DrainTimeout(OutboxError, TimeoutError):
    """``drain`` did not come to an end in time."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        super().__init__(
            f"shard {shard!r} still has due work after the timeout of drain(): handlers take longer, or another "
            "process holds the locks and is not through yet"
        )


class ShutdownError(OutboxError):
    """Outcomes could not be written before ``shutdown_timeout`` ended; their handlers will run again."""

    def __init__(self, notification_ids: Sequence[UUID]) -> None:
        self.notification_ids = tuple(notification_ids)
        ids = ", ".join(str(i) for i in self.notification_ids)
        super().__init__(
            f"{len(self.notification_ids)} outcomes could not be written before shutdown_timeout; these handlers have "
            f"run and will run again: {ids}"
        )


# --- what a handler may raise ----------------------------------------------------------------------


class Unprocessable(Exception):
    """Raised by a handler: this event can never be handled, so do not try again.

    The notification ends DEAD at once, with this error stored. Its siblings are not touched.

    Example::

        raise Unprocessable(f"wallet {event.wallet_id} was closed")
    """


class RetryAfter(Exception):
    """Raised by a handler: try again at that moment, not when the backoff says.

    ``delay`` is a ``timedelta`` or a number of seconds from now; ``at`` is a moment (naive UTC, or aware).
    Give one of them. With ``count_attempt=False`` the run uses up no attempt.

    Example::

        raise RetryAfter(response.headers["Retry-After"])
    """

    def __init__(
        self,
        delay: timedelta | float | str | None = None,
        *,
        at: datetime | None = None,
        count_attempt: bool = True,
    ) -> None:
        if (delay is None) == (at is None):
            raise TypeError("RetryAfter needs either a delay or at=, and not both")
        self.delay = delay
        self.at = at
        self.count_attempt = count_attempt
        super().__init__(f"retry after {delay}" if at is None else f"retry at {at}")


class HandlerFailed(Exception):
    """Why a notification ended DEAD or EXPIRED, as it is stored: what an ``on_dead`` hook is given.

    ``type``, ``message`` and ``traceback`` are those of the last error, ``attempt`` is the run that it ended.
    """

    def __init__(self, type: str, message: str, traceback: str, attempt: int | None) -> None:
        self.type = type
        self.message = message
        self.traceback = traceback
        self.attempt = attempt
        super().__init__(f"{type}: {message}")


class ReturnedAsFailed(Exception):
    """A batch handler returned an envelope as failed, and no error with it."""

    def __init__(self, handler_name: str) -> None:
        self.handler_name = handler_name
        super().__init__(f"handler {handler_name!r} returned this event as failed")


class NotBegun(RetryAfter):
    """The database did not let a handler begin; nothing has happened, and it is tried again in a while."""

    def __init__(self, handler_name: str) -> None:
        super().__init__(1.0, count_attempt=False)
        self.handler_name = handler_name

    def __str__(self) -> str:
        return f"handler {self.handler_name!r} could not be begun: {self.__cause__!r}"


def _where(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
