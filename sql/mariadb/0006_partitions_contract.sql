-- Completes the change of 0005. Run this file when no process of a version without partitions is running any more.
-- Until then, the older index is kept for such processes, and each new row has an additional index entry.
ALTER TABLE eventlog.event_notifications DROP KEY event_notifications_due;

INSERT INTO eventlog.schema_versions VALUES (6, '0006_partitions_contract.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
