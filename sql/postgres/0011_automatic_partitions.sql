-- Automatic partitions: outboxio itself increases and decreases the number of partitions of a handler with its load.
-- auto_number: the number that outboxio has set. If partitions has a different value, or this is NULL, an operator or
-- code has set the number, and outboxio does not change it. waited_date: the last time, to the hour, at which due
-- notifications of the handler waited for more than a second.
ALTER TABLE eventlog.handler_partitions ADD COLUMN auto_number SMALLINT;
ALTER TABLE eventlog.handler_partitions ADD COLUMN waited_date TIMESTAMP;

INSERT INTO eventlog.schema_versions VALUES (11, '0011_automatic_partitions.sql', now() AT TIME ZONE 'UTC');
