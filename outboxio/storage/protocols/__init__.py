"""The seam between outboxio and a database: the protocols that a dialect implements.

To write a dialect, read in this order:

1. ``values``: the values that cross the seam.
2. ``hot``: the protocols of each action, each round of fan-out and each round of dispatch. Speed matters here.
3. ``cold``: the protocols of operators, maintenance and start-up.
4. ``database``: one shard's database, which puts the rest together.

A repository turns rows into values and back. ``Session`` works in the transaction of the application. The
remaining methods are short transactions, or single autocommit statements, on connections of the loops.
"""

from outboxio.storage.protocols.cold import (
    EventStore,
    OperatorStore,
    PartitionRepository,
    RestingRepository,
    RetentionRepository,
    Schema,
    SubscriptionRepository,
)
from outboxio.storage.protocols.database import Database, EventRepository, NotificationRepository
from outboxio.storage.protocols.hot import (
    ClusterLock,
    DispatchStore,
    FanoutStore,
    OrderingRepository,
    Session,
    SessionUnit,
    StartRepository,
)
from outboxio.storage.protocols.operating import OperationRepository, Taken
from outboxio.storage.protocols.values import (
    LONGEST_SILENCE,
    SHARE_OF_HEARTBEAT,
    Announced,
    ClusterView,
    CommitLost,
    ConsumeResult,
    FanoutRequest,
    FanoutResult,
    Head,
    Holder,
    Instance,
    LockGrant,
    NewNotification,
    Orders,
    PartitionCount,
    Pause,
    PurgeResult,
    Rehomed,
    SeenLease,
    StartedRun,
    TransactionLost,
    Waiting,
)

__all__ = [
    "LONGEST_SILENCE",
    "SHARE_OF_HEARTBEAT",
    "Announced",
    "ClusterLock",
    "ClusterView",
    "CommitLost",
    "ConsumeResult",
    "Database",
    "DispatchStore",
    "EventRepository",
    "EventStore",
    "FanoutRequest",
    "FanoutResult",
    "FanoutStore",
    "Head",
    "Holder",
    "Instance",
    "LockGrant",
    "NewNotification",
    "NotificationRepository",
    "OperationRepository",
    "OperatorStore",
    "OrderingRepository",
    "Orders",
    "PartitionCount",
    "PartitionRepository",
    "Pause",
    "PurgeResult",
    "Rehomed",
    "RestingRepository",
    "RetentionRepository",
    "Schema",
    "SeenLease",
    "Session",
    "SessionUnit",
    "StartRepository",
    "StartedRun",
    "SubscriptionRepository",
    "Taken",
    "TransactionLost",
    "Waiting",
]
