-- Partitions: several processes share a handler, each with partitions of its own. A process of an older version may
-- still run beside this schema: it writes rows of partition 0, and finds due rows by the older index.

-- partitioned_seen_date: the last announcement by a process that knows partitions. An older version leaves the column
-- as it is, so a later last_seen_date shows that an older version runs: older_seen_date keeps that moment.
ALTER TABLE eventlog.subscriptions ADD COLUMN partitioned_seen_date DATETIME(6);
ALTER TABLE eventlog.subscriptions ADD COLUMN older_seen_date DATETIME(6);

-- The partition of a row among the partitions of its stored handler name: a hash of the ordering key, or of the event's
-- id without an ordering key.
ALTER TABLE eventlog.event_notifications ADD COLUMN partition_number SMALLINT NOT NULL DEFAULT 0, ALGORITHM=INSTANT;

-- Due rows are found per handler and partition.
ALTER TABLE eventlog.event_notifications
    ADD KEY event_notifications_partition
        (namespace, is_unfinished, handler_name, partition_number, next_retry_at, sequence),
    ALGORITHM=INPLACE, LOCK=NONE;

-- The number of partitions of a stored handler name; without a row the number is 1. Only partitions below active may
-- have unfinished rows. declared is the largest number that the code of a process has asked for.
CREATE TABLE IF NOT EXISTS eventlog.handler_partitions (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    partitions   SMALLINT     NOT NULL,
    active       SMALLINT     NOT NULL,
    declared     SMALLINT     NOT NULL,
    changed_date DATETIME(6)  NOT NULL,

    PRIMARY KEY (namespace, handler_name)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- The processes that share handlers, with the stored handler names of which a process takes locks. A row is a hint for
-- balance: only a cluster lock proves that a process owns a partition.
CREATE TABLE IF NOT EXISTS eventlog.instances (
    namespace      VARCHAR(255) NOT NULL,
    instance       VARCHAR(255) NOT NULL,
    names          JSON         NOT NULL,
    started_date   DATETIME(6)  NOT NULL,
    last_seen_date DATETIME(6)  NOT NULL,

    PRIMARY KEY (namespace, instance)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO eventlog.schema_versions VALUES (5, '0005_partitions.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
