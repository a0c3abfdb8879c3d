-- Automatic partitions: outboxio itself raises and lowers the number of partitions of a handler, by its load.
-- auto_number is the number that outboxio has set. Another value in partitions, or NULL here, is the order of an
-- operator or of code, and outboxio leaves the number alone. waited_date is the last time, to the hour, at which due
-- notifications of the handler waited for longer than a second.
ALTER TABLE eventlog.handler_partitions ADD COLUMN auto_number SMALLINT, ALGORITHM=INSTANT;
ALTER TABLE eventlog.handler_partitions ADD COLUMN waited_date DATETIME(6), ALGORITHM=INSTANT;

INSERT INTO eventlog.schema_versions VALUES (11, '0011_automatic_partitions.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
