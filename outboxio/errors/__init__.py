"""All errors of outboxio.

An error has data as attributes, and a message that says the wrong value and the remedy. Errors of a database driver are
translated in ``storage/`` and chained, so ``__cause__`` is the error of the driver.
"""

from outboxio.errors.configuration import (
    ConfigurationError,
    OtherDatabase,
    OutboxError,
    PooledConnection,
    PoolTooSmall,
    RegistrationError,
    SameDatabase,
    SettingsError,
    UnknownEventType,
    UnknownHandler,
    WrongEventLoop,
    WrongProcess,
)
from outboxio.errors.databases import (
    DatabaseError,
    DatabaseUnavailable,
    DrainTimeout,
    KeyedLockError,
    LockHeld,
    LockLost,
    LockTimeout,
    PoolExhausted,
    RightsMissing,
    SchemaError,
    SchemaInUse,
    SchemaMissing,
    SchemaNewer,
    SchemaNotAdoptable,
    SchemaOccupied,
    ShutdownError,
)
from outboxio.errors.handlers import (
    AmbiguousTypeName,
    CancelledByOperator,
    CrashedProcess,
    HandlerFailed,
    InterruptedRun,
    InvalidEvent,
    InvalidRetryAfter,
    InvalidSignature,
    NotBegun,
    RetryAfter,
    ReturnedAsFailed,
    TooManyHops,
    Unavailable,
    Undescribable,
    Unprocessable,
    UnreadableRow,
)
from outboxio.errors.transactions import (
    CommitUnknown,
    ConcurrentUse,
    NestedConnection,
    NestedExecute,
    NoHandlerTransaction,
    NoTransaction,
    StaleRecord,
    TransactionClosed,
    TransactionEnded,
    TransactionError,
    WaitsForItself,
)

__all__ = [
    "AmbiguousTypeName", "CancelledByOperator", "CommitUnknown", "ConcurrentUse", "ConfigurationError",
    "CrashedProcess", "DatabaseError", "DatabaseUnavailable", "DrainTimeout", "HandlerFailed", "InterruptedRun",
    "InvalidEvent", "InvalidRetryAfter", "InvalidSignature", "KeyedLockError", "LockHeld", "LockLost", "LockTimeout",
    "NestedConnection", "NestedExecute", "NoHandlerTransaction", "NoTransaction", "NotBegun", "OtherDatabase",
    "OutboxError", "PoolExhausted", "PoolTooSmall", "PooledConnection", "RegistrationError", "RetryAfter",
    "ReturnedAsFailed", "RightsMissing", "SameDatabase", "SchemaError", "SchemaInUse", "SchemaMissing",
    "SchemaNewer", "SchemaNotAdoptable", "SchemaOccupied", "SettingsError", "ShutdownError", "StaleRecord",
    "TooManyHops", "TransactionClosed", "TransactionEnded", "TransactionError", "Unavailable", "Undescribable",
    "UnknownEventType", "UnknownHandler", "Unprocessable", "UnreadableRow", "WaitsForItself", "WrongEventLoop",
    "WrongProcess",
]  # fmt: skip

# Tracebacks, logs, stored errors and pickles show the module from which applications import the errors.
for _name in __all__:
    globals()[_name].__module__ = __name__
