-- Writers of notifications that do not know the columns sequence and retention_from, such as the fan-out of Ekbatan,
-- can omit both columns (decision 58). Only the catalog changes, so the table is locked only briefly.
ALTER TABLE eventlog.event_notifications ALTER COLUMN sequence SET DEFAULT 0;
ALTER TABLE eventlog.event_notifications ALTER COLUMN retention_from SET DEFAULT (now() AT TIME ZONE 'UTC');

INSERT INTO eventlog.schema_versions VALUES (9, '0009_neighbours.sql', now() AT TIME ZONE 'UTC');
