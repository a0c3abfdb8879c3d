-- Partitions: several processes share a handler, each with its own partitions. A process of an older version can still
-- run with this schema: it writes rows of partition 0, and finds due rows with the older index.

-- partitioned_seen_date: the last announcement by a process that supports partitions. An older version does not change
-- the column, so a later last_seen_date shows that an older version is running; older_seen_date stores that time.
ALTER TABLE eventlog.subscriptions ADD COLUMN partitioned_seen_date DATETIME(6);
ALTER TABLE eventlog.subscriptions ADD COLUMN older_seen_date DATETIME(6);

-- The partition of a row among the partitions of its stored handler name: a hash of the ordering key, or of the event's
-- id if there is no ordering key.
ALTER TABLE eventlog.event_notifications ADD COLUMN partition_number SMALLINT NOT NULL DEFAULT 0, ALGORITHM=INSTANT;

-- Due rows are found per handler and partition.
ALTER TABLE eventlog.event_notifications
    ADD KEY event_notifications_partition
        (namespace, is_unfinished, handler_name, partition_number, next_retry_at, sequence),
    ALGORITHM=INPLACE, LOCK=NONE;

-- The number of partitions of a stored handler name; 1 if there is no row. Only partitions below active can have
-- unfinished rows. declared: the largest number that the code of any process has requested.
CREATE TABLE IF NOT EXISTS eventlog.handler_partitions (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    partitions   SMALLINT     NOT NULL,
    active       SMALLINT     NOT NULL,
    declared     SMALLINT     NOT NULL,
    changed_date DATETIME(6)  NOT NULL,

    PRIMARY KEY (namespace, handler_name)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin;

-- The processes that share handlers, with the stored handler names whose locks a process takes. A row is only a hint
-- for balancing: only a cluster lock proves that a process owns a partition.
CREATE TABLE IF NOT EXISTS eventlog.instances (
    namespace      VARCHAR(255) NOT NULL,
    instance       VARCHAR(255) NOT NULL,
    names          JSON         NOT NULL,
    started_date   DATETIME(6)  NOT NULL,
    last_seen_date DATETIME(6)  NOT NULL,

    PRIMARY KEY (namespace, instance)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin;

INSERT INTO eventlog.schema_versions VALUES (5, '0005_partitions.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
