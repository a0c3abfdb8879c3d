-- One row per event and subscribed handler, with the full context of the event, so that a run reads a single row.
-- state: PENDING, FAILED (waits for its retry), BLOCKED (behind a row of its key), DYING (failed permanently, its hook
-- is pending); terminal: SUCCEEDED, EXPIRED, DEAD, SKIPPED.
CREATE TABLE eventlog_event_notifications (
    id              TEXT    NOT NULL PRIMARY KEY,
    event_id        TEXT    NOT NULL,
    handler_name    TEXT    NOT NULL,
    namespace       TEXT    NOT NULL,
    action_id       TEXT    NOT NULL,
    action_name     TEXT    NOT NULL,
    action_params   TEXT    NOT NULL,
    started_date    TEXT    NOT NULL,
    completion_date TEXT    NOT NULL,
    model_id        TEXT,
    model_type      TEXT,
    event_type      TEXT    NOT NULL,
    payload         TEXT,
    event_date      TEXT    NOT NULL,
    state           TEXT    NOT NULL,
    attempts        INTEGER NOT NULL DEFAULT 0,
    next_retry_at   TEXT    NOT NULL,
    created_date    TEXT    NOT NULL,
    updated_date    TEXT    NOT NULL,
    sequence        INTEGER NOT NULL,
    ordering_key    TEXT,
    priority        INTEGER NOT NULL DEFAULT 0,
    errors          TEXT    NOT NULL DEFAULT '[]',
    correlation_id  TEXT,
    causation_id    TEXT,
    headers         TEXT,
    hops            INTEGER NOT NULL DEFAULT 0,
    retention_from  TEXT    NOT NULL,
    UNIQUE (event_id, handler_name)
);

-- Due rows are found per handler, so the backlog of one handler does not slow down the others.
-- SQLite evaluates the conditions of all indexes for each row that it writes. So this condition uses OR, which takes a
-- third of the time of IN, and the conditions below start with the columns that are NULL in most rows.
CREATE INDEX eventlog_event_notifications_due
    ON eventlog_event_notifications (namespace, handler_name, next_retry_at, sequence)
    WHERE state = 'PENDING' OR state = 'FAILED' OR state = 'DYING';

-- The key queues: the unfinished rows of each ordering key, in order, and BLOCKED rows without a key. The index has no
-- other rows of unordered handlers.
CREATE INDEX eventlog_event_notifications_line
    ON eventlog_event_notifications (namespace, handler_name, ordering_key, sequence)
    WHERE (ordering_key IS NOT NULL OR state = 'BLOCKED') AND state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING');

-- DEAD and EXPIRED rows of ordered handlers, which may park their key. They have a separate index, because there may be
-- many of them if they do not park keys.
CREATE INDEX eventlog_event_notifications_parked
    ON eventlog_event_notifications (namespace, handler_name, ordering_key, sequence)
    WHERE ordering_key IS NOT NULL AND state IN ('DEAD', 'EXPIRED');

INSERT INTO eventlog_schema_versions
VALUES (2, '0002_event_notifications.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
