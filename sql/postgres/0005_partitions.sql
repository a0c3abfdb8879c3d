-- Partitions: several processes share a handler, each with partitions of its own. A process of an older version may
-- still run beside this schema: it writes rows of partition 0, and finds due rows by the older index.

-- partitioned_seen_date: the last announcement by a process that knows partitions. An older version leaves the column
-- as it is, so a later last_seen_date shows that an older version runs: older_seen_date keeps that moment.
-- These statements come first: fan-out reads subscriptions before it writes notifications, and tables that are locked in
-- the same order cause no deadlock.
ALTER TABLE eventlog.subscriptions ADD COLUMN partitioned_seen_date TIMESTAMP;
ALTER TABLE eventlog.subscriptions ADD COLUMN older_seen_date TIMESTAMP;

-- The partition of a row among the partitions of its stored handler name: a hash of the ordering key, or of the event's
-- id without an ordering key. A constant default does not rewrite the table.
ALTER TABLE eventlog.event_notifications ADD COLUMN IF NOT EXISTS partition_number SMALLINT NOT NULL DEFAULT 0;

-- Due rows are found per handler and partition. The build of the index keeps writers waiting. So on a large table, run
-- the statement above and this statement by hand before, this statement with CREATE INDEX CONCURRENTLY.
CREATE INDEX IF NOT EXISTS event_notifications_partition
    ON eventlog.event_notifications (namespace, handler_name, partition_number, next_retry_at, sequence)
    WHERE state IN ('PENDING', 'FAILED', 'DYING');

-- The number of partitions of a stored handler name; without a row the number is 1. Only partitions below active may
-- have unfinished rows. declared is the largest number that the code of a process has asked for.
CREATE TABLE eventlog.handler_partitions (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    partitions   SMALLINT     NOT NULL,
    active       SMALLINT     NOT NULL,
    declared     SMALLINT     NOT NULL,
    changed_date TIMESTAMP    NOT NULL,
    PRIMARY KEY (namespace, handler_name)
);

-- The processes that share handlers, with the stored handler names of which a process takes locks. A row is a hint for
-- balance: only a cluster lock proves that a process owns a partition.
CREATE TABLE eventlog.instances (
    namespace      VARCHAR(255) NOT NULL,
    instance       VARCHAR(255) NOT NULL,
    names          JSONB        NOT NULL,
    started_date   TIMESTAMP    NOT NULL,
    last_seen_date TIMESTAMP    NOT NULL,
    PRIMARY KEY (namespace, instance)
);

INSERT INTO eventlog.schema_versions VALUES (5, '0005_partitions.sql', now() AT TIME ZONE 'UTC');
