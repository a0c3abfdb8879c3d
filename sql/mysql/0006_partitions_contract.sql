-- The end of the change that 0005 began: run this file when no process of a version without partitions runs any more.
-- Until then the older index is kept for such processes, and each new row costs a second index entry.
ALTER TABLE eventlog.event_notifications DROP KEY event_notifications_due;

INSERT INTO eventlog.schema_versions VALUES (6, '0006_partitions_contract.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
