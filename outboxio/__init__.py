"""The transactional outbox for asyncio: commit your rows and their events together, handle every event afterwards."""

from outboxio.action import Action, Retry
from outboxio.backoff import RetryPolicy
from outboxio.batch import Batch
from outboxio.clock import Clock
from outboxio.consuming import Consumption, Received
from outboxio.envelope import EventEnvelope
from outboxio.errors import (
    AmbiguousTypeName,
    CommitUnknown,
    ConcurrentUse,
    ConfigurationError,
    CrashedProcess,
    DatabaseError,
    DatabaseUnavailable,
    DrainTimeout,
    HandlerFailed,
    InterruptedRun,
    InvalidEvent,
    NestedExecute,
    NoHandlerTransaction,
    NotBegun,
    NoTransaction,
    OutboxError,
    PooledConnection,
    PoolTooSmall,
    RegistrationError,
    RetryAfter,
    ReturnedAsFailed,
    SameDatabase,
    SchemaError,
    SchemaMissing,
    SchemaNewer,
    SchemaOccupied,
    SettingsError,
    ShutdownError,
    StaleRecord,
    TooManyHops,
    TransactionClosed,
    TransactionEnded,
    TransactionError,
    Unprocessable,
)
from outboxio.event import Event
from outboxio.handler import EventHandler
from outboxio.inbox import Inbox
from outboxio.notification import NotificationRecord, State
from outboxio.options import Delivery, OnDeadKey
from outboxio.outbox import Drained, Outbox
from outboxio.redaction import Redact
from outboxio.retention import Removed
from outboxio.settings import Settings
from outboxio.storage import Shard
from outboxio.transaction import Transaction

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AmbiguousTypeName",
    "Batch",
    "Clock",
    "CommitUnknown",
    "ConcurrentUse",
    "ConfigurationError",
    "Consumption",
    "CrashedProcess",
    "DatabaseError",
    "DatabaseUnavailable",
    "Delivery",
    "DrainTimeout",
    "Drained",
    "Event",
    "EventEnvelope",
    "EventHandler",
    "HandlerFailed",
    "Inbox",
    "InterruptedRun",
    "InvalidEvent",
    "NestedExecute",
    "NoHandlerTransaction",
    "NoTransaction",
    "NotBegun",
    "NotificationRecord",
    "OnDeadKey",
    "Outbox",
    "OutboxError",
    "PoolTooSmall",
    "PooledConnection",
    "Received",
    "Redact",
    "RegistrationError",
    "Removed",
    "Retry",
    "RetryAfter",
    "RetryPolicy",
    "ReturnedAsFailed",
    "SameDatabase",
    "SchemaError",
    "SchemaMissing",
    "SchemaNewer",
    "SchemaOccupied",
    "Settings",
    "SettingsError",
    "Shard",
    "ShutdownError",
    "StaleRecord",
    "State",
    "TooManyHops",
    "Transaction",
    "TransactionClosed",
    "TransactionEnded",
    "TransactionError",
    "Unprocessable",
    "__version__",
]
