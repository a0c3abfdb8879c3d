-- Writers of notifications that do not know the columns sequence and retention_from, such as the fan-out of Ekbatan,
-- can omit both columns (decision 58). Without a default, INSERT IGNORE would store a zero date.
ALTER TABLE eventlog.event_notifications ALTER COLUMN sequence SET DEFAULT 0;
ALTER TABLE eventlog.event_notifications ALTER COLUMN retention_from SET DEFAULT (UTC_TIMESTAMP(6));

INSERT INTO eventlog.schema_versions VALUES (9, '0009_neighbours.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
