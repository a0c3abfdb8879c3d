"""The seam between outboxio and a database: the protocols that a dialect implements.

To write a dialect, read in this order:

1. ``values``: the values that cross the seam.
2. ``hot``: the protocols of each action, each round of fan-out and each round of dispatch. Speed matters here.
3. ``database``: one shard's database, which puts the rest together; migration, and the checks at start-up.

Tables that only operators use are in ``storage/tables``; ``operating`` has the values that these return.

A repository turns rows into values and back. ``Session`` works in the transaction of the application. The
remaining methods are short transactions, or single autocommit statements, on connections of the loops.
"""

from outboxio.storage.protocols.database import SHARE_OF_AUTOMATIC, Database, Schema, counts_of, full_of_automatic
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
    ActionPlace,
    BulkOrder,
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
    Piece,
    Taken,
)
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
    active_partitions,
    slots_of,
)

__all__ = [
    "LONGEST_SILENCE", "SHARE_OF_AUTOMATIC", "SHARE_OF_HEARTBEAT", "ActionPlace", "Announced", "BulkOrder",
    "ClusterLock", "ClusterView", "CommitLost", "ConsumeResult", "Counted", "Database", "DeadFigures",
    "DeferredFigures", "DispatchStore", "DueFigures", "EventSummary", "FanoutRequest", "FanoutResult", "FanoutStore",
    "Found", "FoundAction", "HandlerMinute", "Head", "Holder", "Instance", "InstanceReport", "KeySession", "LastError",
    "LockGrant", "NewNotification", "OrderingRepository", "Orders", "ParkedKey", "PartitionCount", "Pause", "Piece",
    "PurgeResult", "Rehomed", "Schema", "SeenLease", "Session", "SessionUnit", "StartedRun", "Taken", "TransactionLost",
    "Waiting", "active_partitions", "counts_of", "full_of_automatic", "slots_of",
]  # fmt: skip
