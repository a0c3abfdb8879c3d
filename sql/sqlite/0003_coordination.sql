-- The handlers of the instances of every service: fan-out serves all of them, whichever process runs the fan-out.
-- Either event_type or topic is set, never both: the unset column is the empty string.
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

-- The term of each cluster lock: raised by every new holder, required by every outcome.
-- released_term is the last term whose holder gave the lock back; a holder that dies leaves the column as it is.
CREATE TABLE eventlog_leases (
    name          TEXT    NOT NULL PRIMARY KEY,
    term          INTEGER NOT NULL,
    owner         TEXT    NOT NULL,
    acquired_date TEXT    NOT NULL,
    released_term INTEGER NOT NULL
);

-- Handlers that an operator paused, until ended_date is set. An ended pause stays in the table: rows that waited for
-- its end count their retention from that moment.
CREATE TABLE eventlog_pauses (
    namespace    TEXT NOT NULL,
    handler_name TEXT NOT NULL,
    paused_date  TEXT NOT NULL,
    ended_date   TEXT,
    PRIMARY KEY (namespace, handler_name)
);

-- Runs that were recorded before they began, because a holder of their handler's lock had died. If the next holder dies
-- too, the rows that are left are suspects: each may be the cause.
CREATE TABLE eventlog_started_runs (
    notification_id TEXT    NOT NULL PRIMARY KEY,
    namespace       TEXT    NOT NULL,
    handler_name    TEXT    NOT NULL,
    starts          INTEGER NOT NULL,
    started_date    TEXT    NOT NULL
);
CREATE INDEX eventlog_started_runs_handler ON eventlog_started_runs (namespace, handler_name);

INSERT INTO eventlog_schema_versions VALUES (3, '0003_coordination.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
