-- Messages that the inbox has received. They are kept for deduplication after their events are removed.
CREATE TABLE eventlog.consumed_events (
    source        VARCHAR(255) NOT NULL,
    external_id   VARCHAR(255) NOT NULL,
    handler_name  VARCHAR(255) NOT NULL,
    event_id      UUID         NOT NULL,
    payload_hash  VARCHAR(64)  NOT NULL,
    consumed_date TIMESTAMP    NOT NULL,
    PRIMARY KEY (source, external_id, handler_name)
);

CREATE INDEX consumed_events_date ON eventlog.consumed_events (consumed_date);

INSERT INTO eventlog.schema_versions VALUES (4, '0004_consumed_events.sql', now() AT TIME ZONE 'UTC');
