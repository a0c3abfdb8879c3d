-- Messages that the inbox has received. They are kept for deduplication after their events are removed.
CREATE TABLE IF NOT EXISTS eventlog.consumed_events (
    source        VARCHAR(255) NOT NULL,
    external_id   VARCHAR(255) NOT NULL,
    handler_name  VARCHAR(255) NOT NULL,
    event_id      UUID     NOT NULL,
    payload_hash  VARCHAR(64)  NOT NULL,
    consumed_date DATETIME(6)  NOT NULL,

    PRIMARY KEY (source, external_id, handler_name),
    KEY consumed_events_date (consumed_date)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO eventlog.schema_versions VALUES (4, '0004_consumed_events.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
