-- outboxio, SQLite 3.35 or later: the outbox itself.
-- Run the files of this directory in order (sqlite3 -bail app.db < 0001_events.sql). Each file records that it has been
-- applied. SQLite has no schemas, so the names of all tables and indexes start with eventlog_.

-- The files of this directory that have been applied.
CREATE TABLE eventlog_schema_versions (
    version      INTEGER NOT NULL PRIMARY KEY,
    file         TEXT    NOT NULL,
    applied_date TEXT    NOT NULL
);

-- One row per emitted event, with the full context of the action. An action without events has one row too, the
-- sentinel event: its model_id, model_type, event_type and payload are NULL.
-- Dates are in UTC, without a time zone, always with six decimals (2026-01-31 09:05:00.000000), so that they sort as
-- text.
-- Ids are UUIDs of 36 characters, JSON is text, booleans are 0 and 1.
-- In SQLite, only the primary key can number rows, so sequence is the primary key, and id has a unique key.
-- AUTOINCREMENT: a number is never reused, even after the newest rows were deleted.
CREATE TABLE eventlog_events (
    id              TEXT    NOT NULL UNIQUE,
    namespace       TEXT    NOT NULL,
    action_id       TEXT    NOT NULL,
    action_name     TEXT    NOT NULL,
    action_params   TEXT    NOT NULL,
    started_date    TEXT    NOT NULL,
    completion_date TEXT    NOT NULL,
    model_id        TEXT,
    model_type      TEXT,
    event_type      TEXT,
    payload         TEXT,
    event_date      TEXT    NOT NULL,
    delivered       INTEGER NOT NULL,
    sequence        INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    ordering_key    TEXT,
    topic           TEXT,
    source          TEXT,
    correlation_id  TEXT,
    causation_id    TEXT,
    headers         TEXT,
    available_at    TEXT,
    hops            INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX eventlog_idx_events_action_id ON eventlog_events (action_id);

-- Fan-out scans each subscribed type separately. Three kinds of rows cost nothing: rows of unsubscribed types, rows of
-- other services, and delivered rows.
CREATE INDEX eventlog_events_undelivered ON eventlog_events (namespace, event_type, sequence)
    WHERE delivered = FALSE AND event_type IS NOT NULL;

-- The same for subscriptions to a topic.
CREATE INDEX eventlog_events_undelivered_topic ON eventlog_events (namespace, topic, sequence)
    WHERE delivered = FALSE AND topic IS NOT NULL;

INSERT INTO eventlog_schema_versions VALUES (1, '0001_events.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
