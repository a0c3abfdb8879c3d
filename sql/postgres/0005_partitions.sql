-- Partitions: several processes share a handler, each with its own partitions. A process of an older version can still
-- run with this schema: it writes rows of partition 0, and finds due rows with the older index.

-- partitioned_seen_date: the last announcement by a process that supports partitions. An older version does not change
-- the column, so a later last_seen_date shows that an older version is running; older_seen_date stores that time.
-- These statements come first: fan-out reads subscriptions before it writes notifications, and locking tables in the
-- same order prevents deadlocks.
ALTER TABLE eventlog.subscriptions ADD COLUMN partitioned_seen_date TIMESTAMP;
ALTER TABLE eventlog.subscriptions ADD COLUMN older_seen_date TIMESTAMP;

-- The partition of a row among the partitions of its stored handler name: a hash of the ordering key, or of the event's
-- id if there is no ordering key. A constant default does not rewrite the table.
ALTER TABLE eventlog.event_notifications ADD COLUMN IF NOT EXISTS partition_number SMALLINT NOT NULL DEFAULT 0;

-- Due rows are found per handler and partition. Building the index blocks writers. So for a large table, run the
-- statement above and this one manually beforehand, this one with CREATE INDEX CONCURRENTLY.
CREATE INDEX IF NOT EXISTS event_notifications_partition
    ON eventlog.event_notifications (namespace, handler_name, partition_number, next_retry_at, sequence)
    WHERE state IN ('PENDING', 'FAILED', 'DYING');

-- The number of partitions of a stored handler name; 1 if there is no row. Only partitions below active can have
-- unfinished rows. declared: the largest number that the code of any process has requested.
CREATE TABLE eventlog.handler_partitions (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    partitions   SMALLINT     NOT NULL,
    active       SMALLINT     NOT NULL,
    declared     SMALLINT     NOT NULL,
    changed_date TIMESTAMP    NOT NULL,
    PRIMARY KEY (namespace, handler_name)
);

-- The processes that share handlers, with the stored handler names whose locks a process takes. A row is only a hint
-- for balancing: only a cluster lock proves that a process owns a partition.
CREATE TABLE eventlog.instances (
    namespace      VARCHAR(255) NOT NULL,
    instance       VARCHAR(255) NOT NULL,
    names          JSONB        NOT NULL,
    started_date   TIMESTAMP    NOT NULL,
    last_seen_date TIMESTAMP    NOT NULL,
    PRIMARY KEY (namespace, instance)
);

INSERT INTO eventlog.schema_versions VALUES (5, '0005_partitions.sql', now() AT TIME ZONE 'UTC');
