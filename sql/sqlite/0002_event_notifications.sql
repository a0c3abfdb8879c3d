-- One row per event and subscribed handler, with the event's whole context, so that handling reads a single row.
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

-- Due rows are found per handler: the backlog of a handler is invisible to all remaining handlers.
-- SQLite evaluates the conditions of all indexes for each row that SQLite writes. So this condition is an OR, which takes
-- a third of the time of an IN, and the conditions below begin with the columns that are NULL in most rows.
CREATE INDEX eventlog_event_notifications_due
    ON eventlog_event_notifications (namespace, handler_name, next_retry_at, sequence)
    WHERE state = 'PENDING' OR state = 'FAILED' OR state = 'DYING';

-- Rows that wait for earlier rows: the unfinished rows of each ordering key, in their order, and BLOCKED rows without a
-- key. The index has no further rows of unordered handlers.
CREATE INDEX eventlog_event_notifications_line
    ON eventlog_event_notifications (namespace, handler_name, ordering_key, sequence)
    WHERE (ordering_key IS NOT NULL OR state = 'BLOCKED') AND state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING');

-- DEAD and EXPIRED rows of ordered handlers, which may park their key. These rows have an index of their own, because
-- there may be many where they park no key.
CREATE INDEX eventlog_event_notifications_parked
    ON eventlog_event_notifications (namespace, handler_name, ordering_key, sequence)
    WHERE ordering_key IS NOT NULL AND state IN ('DEAD', 'EXPIRED');

INSERT INTO eventlog_schema_versions
VALUES (2, '0002_event_notifications.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
