-- Messages that the inbox has received. They are kept for deduplication after their events are removed.
CREATE TABLE eventlog_consumed_events (
    source        TEXT NOT NULL,
    external_id   TEXT NOT NULL,
    handler_name  TEXT NOT NULL,
    event_id      TEXT NOT NULL,
    payload_hash  TEXT NOT NULL,
    consumed_date TEXT NOT NULL,
    PRIMARY KEY (source, external_id, handler_name)
);

CREATE INDEX eventlog_consumed_events_date ON eventlog_consumed_events (consumed_date);

INSERT INTO eventlog_schema_versions VALUES (4, '0004_consumed_events.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
