-- Rates: the time up to which all starts of a handler with rate= are reserved, in microseconds since 1970. A process
-- reserves the next starts by advancing this time. Processes of the previous version can run with this schema.
CREATE TABLE IF NOT EXISTS eventlog.rates (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    next_us      BIGINT       NOT NULL,

    PRIMARY KEY (namespace, handler_name)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO eventlog.schema_versions VALUES (12, '0012_rates.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
