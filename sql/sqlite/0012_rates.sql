-- Rates: the time up to which all starts of a handler with rate= are reserved, in microseconds since 1970. A process
-- reserves the next starts by advancing this time. Processes of the previous version can run with this schema.
CREATE TABLE IF NOT EXISTS eventlog_rates (
    namespace    TEXT    NOT NULL,
    handler_name TEXT    NOT NULL,
    next_us      INTEGER NOT NULL,
    PRIMARY KEY (namespace, handler_name)
);

INSERT INTO eventlog_schema_versions VALUES (12, '0012_rates.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
