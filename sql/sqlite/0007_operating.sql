-- For operators: statistics by minute, reports of processes, operations, and indexes for the queries of operators.
-- Processes of the previous version can run with this schema: their statements use none of these tables and indexes.

-- DEAD and EXPIRED rows of each handler, by the time at which they ended. A row is added to the index when it becomes
-- DEAD or EXPIRED, and removed when an operator retries it.
CREATE INDEX eventlog_event_notifications_dead
    ON eventlog_event_notifications (namespace, handler_name, updated_date, id)
    WHERE state = 'DEAD' OR state = 'EXPIRED';

-- The events that were caused by an event.
CREATE INDEX eventlog_events_causation ON eventlog_events (causation_id) WHERE causation_id IS NOT NULL;

-- The events of a request. Events without a correlation id cost nothing.
CREATE INDEX eventlog_events_correlation ON eventlog_events (namespace, correlation_id)
    WHERE correlation_id IS NOT NULL;

-- The runs of a handler in a process within a minute. Each process writes a row for each handler that had runs.
-- durations and lags are histograms: JSON arrays of counts (outboxio/statistics/buckets.py).
-- duration_us: the sum over all runs, in microseconds.
CREATE TABLE eventlog_handler_minutes (
    namespace    TEXT    NOT NULL,
    minute_date  TEXT    NOT NULL,
    handler_name TEXT    NOT NULL,
    instance     TEXT    NOT NULL,
    succeeded    INTEGER NOT NULL,
    failed       INTEGER NOT NULL,
    dead         INTEGER NOT NULL,
    expired      INTEGER NOT NULL,
    skipped      INTEGER NOT NULL,
    duration_us  INTEGER NOT NULL,
    durations    TEXT    NOT NULL,
    lags         TEXT    NOT NULL,
    PRIMARY KEY (namespace, minute_date, handler_name, instance)
);

-- The processes in running(), as they report themselves. report: a JSON object with the roles, the handlers, the
-- current runs, the stuck runs and the lag of the event loop. A process counts as alive until it has missed three
-- reports.
CREATE TABLE eventlog_instance_reports (
    namespace      TEXT    NOT NULL,
    instance       TEXT    NOT NULL,
    version        TEXT    NOT NULL,
    started_date   TEXT    NOT NULL,
    last_seen_date TEXT    NOT NULL,
    delay_seconds  INTEGER NOT NULL,
    report         TEXT    NOT NULL,
    PRIMARY KEY (namespace, instance)
);

-- The operations: who has requested what, and the progress. state: RUNNING, DONE, STOPPED, FAILED.
-- request: a JSON object with the filter and the other arguments. reached: the position after the last chunk that was
-- changed, written in the transaction of the chunk, so that a process that resumes the operation repeats nothing.
-- worker: the process that runs the operation; another process resumes it when updated_date is too old.
CREATE TABLE eventlog_operations (
    id            TEXT    NOT NULL PRIMARY KEY,
    namespace     TEXT    NOT NULL,
    kind          TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    request       TEXT    NOT NULL,
    actor         TEXT    NOT NULL,
    origin        TEXT    NOT NULL,
    reason        TEXT,
    matched       INTEGER NOT NULL,
    done          INTEGER NOT NULL,
    refused       INTEGER NOT NULL,
    reached       TEXT,
    worker        TEXT    NOT NULL,
    stop_ordered  INTEGER NOT NULL,
    created_date  TEXT    NOT NULL,
    updated_date  TEXT    NOT NULL,
    finished_date TEXT,
    error         TEXT
);
CREATE INDEX eventlog_operations_created ON eventlog_operations (namespace, created_date, id);
CREATE INDEX eventlog_operations_running ON eventlog_operations (namespace, state, updated_date);

INSERT INTO eventlog_schema_versions VALUES (7, '0007_operating.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
