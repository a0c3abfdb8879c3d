-- One row per event and handler that is owed it, with the event's whole context, so that handling reads one row.
-- state: PENDING, FAILED (waits for its retry), BLOCKED (behind a row of its key), DYING (verdict reached, hook owed);
-- terminal: SUCCEEDED, EXPIRED, DEAD, SKIPPED.
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

-- Due rows are found per handler: the backlog of one handler is invisible to the others.
CREATE INDEX eventlog_event_notifications_due
    ON eventlog_event_notifications (namespace, handler_name, next_retry_at, sequence)
    WHERE state IN ('PENDING', 'FAILED', 'DYING');

-- Rows that wait for one another: what is unfinished of each ordering key, in its order, and what is blocked without
-- a key. Other rows of unordered handlers are not in it.
CREATE INDEX eventlog_event_notifications_line
    ON eventlog_event_notifications (namespace, handler_name, ordering_key, sequence)
    WHERE state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') AND (ordering_key IS NOT NULL OR state = 'BLOCKED');

-- DEAD and EXPIRED rows of ordered handlers, which may park their key. They are not in the line: where they park
-- nothing, there may be many.
CREATE INDEX eventlog_event_notifications_parked
    ON eventlog_event_notifications (namespace, handler_name, ordering_key, sequence)
    WHERE state IN ('DEAD', 'EXPIRED') AND ordering_key IS NOT NULL;

INSERT INTO eventlog_schema_versions
VALUES (2, '0002_event_notifications.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
