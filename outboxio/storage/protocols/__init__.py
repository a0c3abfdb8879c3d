"""The interface between outboxio and a database: the protocols that a dialect implements.

To write a dialect, read in this order:

1. ``values``: the values that are passed.
2. ``hot``: the protocols of every action, every round of fan-out and every round of dispatch. Speed matters here.
3. ``database``: the database of a shard, which combines these; migration, and the checks at startup.

Tables that only operators use are in ``storage/tables``; ``operating`` has the values that they return.

``Session`` works in the transaction of your application. All other methods are short transactions, or single autocommit
statements, on the connections of the loops.
"""

from outboxio.storage.protocols.database import SHARE_OF_AUTOMATIC, Database, Schema, counts_of, near_lock_capacity
from outboxio.storage.protocols.hot import (
    ClusterLock,
    DispatchStore,
    FanoutStore,
    KeySession,
    OrderingRepository,
    Session,
    SessionUnit,
)
from outboxio.storage.protocols.operating import (
    ActionPageCursor,
    BulkOperation,
    ChunkResult,
    Counted,
    DeadFigures,
    DeferredFigures,
    DueFigures,
    EventSummary,
    Found,
    FoundAction,
    HandlerMinute,
    InstanceReport,
    LastError,
    ParkedKey,
    Taken,
)
from outboxio.storage.protocols.values import (
    LONGEST_SILENCE,
    SHARE_OF_HEARTBEAT,
    Announced,
    ClusterView,
    CommitLost,
    ConsumeResult,
    ControlState,
    FanoutRequest,
    FanoutResult,
    Head,
    Holder,
    Instance,
    LockGrant,
    NewNotification,
    PartitionCount,
    Pause,
    PurgeResult,
    RehashResult,
    SeenLease,
    StartedRun,
    TransactionLost,
    Waiting,
    active_partitions,
    slots_of,
)

__all__ = [
    "LONGEST_SILENCE", "SHARE_OF_AUTOMATIC", "SHARE_OF_HEARTBEAT", "ActionPageCursor", "Announced", "BulkOperation",
    "ChunkResult", "ClusterLock", "ClusterView", "CommitLost", "ConsumeResult", "ControlState", "Counted",
    "Database", "DeadFigures", "DeferredFigures", "DispatchStore", "DueFigures", "EventSummary", "FanoutRequest",
    "FanoutResult", "FanoutStore", "Found", "FoundAction", "HandlerMinute", "Head", "Holder", "Instance",
    "InstanceReport", "KeySession", "LastError", "LockGrant", "NewNotification", "OrderingRepository", "ParkedKey",
    "PartitionCount", "Pause", "PurgeResult", "RehashResult", "Schema", "SeenLease", "Session", "SessionUnit",
    "StartedRun", "Taken", "TransactionLost", "Waiting", "active_partitions", "counts_of", "near_lock_capacity",
    "slots_of",
]  # fmt: skip
