-- Rates: the time up to which all starts of a handler with rate= are reserved, in microseconds since 1970. A process
-- reserves the next starts by advancing this time. Processes of the previous version can run with this schema.
CREATE TABLE eventlog.rates (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    next_us      BIGINT       NOT NULL,
    PRIMARY KEY (namespace, handler_name)
);

INSERT INTO eventlog.schema_versions VALUES (12, '0012_rates.sql', now() AT TIME ZONE 'UTC');
