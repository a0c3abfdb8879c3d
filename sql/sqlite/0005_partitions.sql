-- On SQLite, a handler has a single partition, because there is a single writer. The column exists so that rows have
-- the same columns on all databases.
ALTER TABLE eventlog_event_notifications ADD COLUMN partition_number INTEGER NOT NULL DEFAULT 0;

INSERT INTO eventlog_schema_versions VALUES (5, '0005_partitions.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
