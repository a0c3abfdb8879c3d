-- The handlers of all instances of each service: fan-out creates notifications for all of them, no matter which process
-- runs it.
-- Either event_type or topic is set, never both. The other column is the empty string.
CREATE TABLE eventlog_subscriptions (
    namespace      TEXT    NOT NULL,
    handler_name   TEXT    NOT NULL,
    event_type     TEXT    NOT NULL,
    topic          TEXT    NOT NULL,
    aliases        TEXT    NOT NULL,
    priority       INTEGER NOT NULL,
    ordered        INTEGER NOT NULL,
    last_seen_date TEXT    NOT NULL,
    PRIMARY KEY (namespace, handler_name, event_type, topic)
);

-- The term of each cluster lock: incremented by each new holder, and checked when an outcome is written.
-- released_term: the last term whose holder released the lock. A holder that crashes does not change it.
CREATE TABLE eventlog_leases (
    name          TEXT    NOT NULL PRIMARY KEY,
    term          INTEGER NOT NULL,
    owner         TEXT    NOT NULL,
    acquired_date TEXT    NOT NULL,
    released_term INTEGER NOT NULL
);

-- Handlers that an operator has paused, until ended_date is set. An ended pause is kept: the retention of rows that
-- waited for it starts at that time.
CREATE TABLE eventlog_pauses (
    namespace    TEXT NOT NULL,
    handler_name TEXT NOT NULL,
    paused_date  TEXT NOT NULL,
    ended_date   TEXT,
    PRIMARY KEY (namespace, handler_name)
);

-- Runs that were recorded before they started, because a holder of their handler's lock had crashed. If the next holder
-- crashes too, the remaining rows are suspects: each may be the cause.
CREATE TABLE eventlog_started_runs (
    notification_id TEXT    NOT NULL PRIMARY KEY,
    namespace       TEXT    NOT NULL,
    handler_name    TEXT    NOT NULL,
    starts          INTEGER NOT NULL,
    started_date    TEXT    NOT NULL
);
CREATE INDEX eventlog_started_runs_handler ON eventlog_started_runs (namespace, handler_name);

INSERT INTO eventlog_schema_versions VALUES (3, '0003_coordination.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
