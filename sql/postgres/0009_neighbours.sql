-- Writers of notifications that do not know the columns sequence and retention_from, such as the fan-out of Ekbatan, may
-- leave both columns out (decision 58). Only the catalogue changes, so the table is locked for a moment.
ALTER TABLE eventlog.event_notifications ALTER COLUMN sequence SET DEFAULT 0;
ALTER TABLE eventlog.event_notifications ALTER COLUMN retention_from SET DEFAULT (now() AT TIME ZONE 'UTC');

INSERT INTO eventlog.schema_versions VALUES (9, '0009_neighbours.sql', now() AT TIME ZONE 'UTC');
