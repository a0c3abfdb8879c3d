"""The transactional outbox for asyncio: commit your rows and their events together, handle every event afterwards."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from outboxio.actions.reading import Connection
from outboxio.errors import (
    AmbiguousTypeName,
    CancelledByOperator,
    CommitUnknown,
    ConcurrentUse,
    ConfigurationError,
    CrashedProcess,
    DatabaseError,
    DatabaseUnavailable,
    DrainTimeout,
    HandlerFailed,
    HandlerNotStarted,
    InterruptedRun,
    InvalidEvent,
    InvalidRetryAfter,
    InvalidSignature,
    KeyedLockError,
    LockHeld,
    LockLost,
    LockTimeout,
    MalformedRow,
    NestedConnection,
    NestedExecute,
    NoHandlerTransaction,
    NoTransaction,
    OutboxError,
    PooledConnection,
    PoolExhausted,
    PoolTooSmall,
    RegistrationError,
    RetryAfter,
    ReturnedAsFailed,
    RightsMissing,
    SameDatabase,
    SchemaError,
    SchemaInUse,
    SchemaMissing,
    SchemaNewer,
    SchemaNotAdoptable,
    SchemaOccupied,
    SelfDeadlock,
    SettingsError,
    ShutdownError,
    StaleRecord,
    TooManyHops,
    TransactionClosed,
    TransactionEnded,
    TransactionError,
    Unavailable,
    UnknownEventType,
    UnknownHandler,
    UnprintableError,
    Unprocessable,
    WrongDatabase,
    WrongEventLoop,
    WrongProcess,
)
from outboxio.handlers.handler import EventHandler
from outboxio.handlers.options import Batch, Delivery, OnDeadKey
from outboxio.handlers.rate import Rate
from outboxio.handlers.registration import Around, Handlers
from outboxio.jobs.job import Job
from outboxio.locks.keyed_lock import KeyedLock
from outboxio.model.action import Action, Retry
from outboxio.model.decorated import action, event, upcaster
from outboxio.model.envelope import EventEnvelope
from outboxio.model.event import Event
from outboxio.model.notification import NotificationRecord, State
from outboxio.model.operating.groups import Filter
from outboxio.model.payloads.classes import AnyEvent
from outboxio.model.redaction import Redact
from outboxio.model.retry import RetryPolicy
from outboxio.model.snapshot import Snapshot
from outboxio.outbox import Drained, Outbox
from outboxio.settings import Settings
from outboxio.storage import Shard
from outboxio.support.clock import Clock
from outboxio.transaction import Transaction
from outboxio.version import __version__

if TYPE_CHECKING:
    from outboxio.health.pages import health_app, serve_health
    from outboxio.health.values import (
        Finding,
        HandlerStatus,
        Health,
        InstanceStatus,
        KeyStatus,
        LockStatus,
        LoopHealth,
        Overview,
        OverviewFigures,
        ShardHealth,
        ShardStatus,
        StuckRunStatus,
    )
    from outboxio.inbox.inbox import Inbox
    from outboxio.inbox.inline import Consumption, Received
    from outboxio.model.operating.groups import Group, Groups, HandlerHistory, HistoryPoint
    from outboxio.model.operating.operation import (
        BoundedCount,
        EmittedEvent,
        EventTree,
        Operation,
        OperationState,
        Page,
        StoredAction,
        StoredEvent,
        TreeNode,
    )
    from outboxio.operations.admin import Admin
    from outboxio.operations.partitions.owners import ClusterInstance, HandlerPartitions, PartitionOwner
    from outboxio.operations.retention import Removed
    from outboxio.operations.stranded import Stranded

# Names that only operators and inboxes need are imported on first use, because most processes only write events and
# run handlers. The imports above are for type checkers and readers.
_LAZY = {
    name: module
    for module, names in {
        "outboxio.health.pages": ("health_app", "serve_health"),
        "outboxio.health.values": (
            "Finding",
            "HandlerStatus",
            "Health",
            "InstanceStatus",
            "KeyStatus",
            "LockStatus",
            "LoopHealth",
            "Overview",
            "OverviewFigures",
            "ShardHealth",
            "ShardStatus",
            "StuckRunStatus",
        ),
        "outboxio.inbox.inbox": ("Inbox",),
        "outboxio.inbox.inline": ("Consumption", "Received"),
        "outboxio.model.operating.groups": ("Group", "Groups", "HandlerHistory", "HistoryPoint"),
        "outboxio.model.operating.operation": (
            "BoundedCount",
            "EmittedEvent",
            "EventTree",
            "Operation",
            "OperationState",
            "Page",
            "StoredAction",
            "StoredEvent",
            "TreeNode",
        ),
        "outboxio.operations.admin": ("Admin",),
        "outboxio.operations.partitions.owners": ("ClusterInstance", "HandlerPartitions", "PartitionOwner"),
        "outboxio.operations.retention": ("Removed",),
        "outboxio.operations.stranded": ("Stranded",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


__all__ = [
    "Action",
    "Admin",
    "AmbiguousTypeName",
    "AnyEvent",
    "Around",
    "Batch",
    "BoundedCount",
    "CancelledByOperator",
    "Clock",
    "ClusterInstance",
    "CommitUnknown",
    "ConcurrentUse",
    "ConfigurationError",
    "Connection",
    "Consumption",
    "CrashedProcess",
    "DatabaseError",
    "DatabaseUnavailable",
    "Delivery",
    "DrainTimeout",
    "Drained",
    "EmittedEvent",
    "Event",
    "EventEnvelope",
    "EventHandler",
    "EventTree",
    "Filter",
    "Finding",
    "Group",
    "Groups",
    "HandlerFailed",
    "HandlerHistory",
    "HandlerNotStarted",
    "HandlerPartitions",
    "HandlerStatus",
    "Handlers",
    "Health",
    "HistoryPoint",
    "Inbox",
    "InstanceStatus",
    "InterruptedRun",
    "InvalidEvent",
    "InvalidRetryAfter",
    "InvalidSignature",
    "Job",
    "KeyStatus",
    "KeyedLock",
    "KeyedLockError",
    "LockHeld",
    "LockLost",
    "LockStatus",
    "LockTimeout",
    "LoopHealth",
    "MalformedRow",
    "NestedConnection",
    "NestedExecute",
    "NoHandlerTransaction",
    "NoTransaction",
    "NotificationRecord",
    "OnDeadKey",
    "Operation",
    "OperationState",
    "Outbox",
    "OutboxError",
    "Overview",
    "OverviewFigures",
    "Page",
    "PartitionOwner",
    "PoolExhausted",
    "PoolTooSmall",
    "PooledConnection",
    "Rate",
    "Received",
    "Redact",
    "RegistrationError",
    "Removed",
    "Retry",
    "RetryAfter",
    "RetryPolicy",
    "ReturnedAsFailed",
    "RightsMissing",
    "SameDatabase",
    "SchemaError",
    "SchemaInUse",
    "SchemaMissing",
    "SchemaNewer",
    "SchemaNotAdoptable",
    "SchemaOccupied",
    "SelfDeadlock",
    "Settings",
    "SettingsError",
    "Shard",
    "ShardHealth",
    "ShardStatus",
    "ShutdownError",
    "Snapshot",
    "StaleRecord",
    "State",
    "StoredAction",
    "StoredEvent",
    "Stranded",
    "StuckRunStatus",
    "TooManyHops",
    "Transaction",
    "TransactionClosed",
    "TransactionEnded",
    "TransactionError",
    "TreeNode",
    "Unavailable",
    "UnknownEventType",
    "UnknownHandler",
    "UnprintableError",
    "Unprocessable",
    "WrongDatabase",
    "WrongEventLoop",
    "WrongProcess",
    "__version__",
    "action",
    "event",
    "health_app",
    "serve_health",
    "upcaster",
]
