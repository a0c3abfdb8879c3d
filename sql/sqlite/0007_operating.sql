-- For operators: figures by minute, reports of processes, orders of operators, and indexes for what operators ask.
-- Processes of the former version run beside these parts: their statements use none of the tables and indexes.

-- DEAD and EXPIRED rows of each handler, by the moment of their end. A row enters the index when the row ends badly, and
-- leaves the index when an operator retries the row.
CREATE INDEX eventlog_event_notifications_dead
    ON eventlog_event_notifications (namespace, handler_name, updated_date, id)
    WHERE state = 'DEAD' OR state = 'EXPIRED';

-- The events that an event has caused.
CREATE INDEX eventlog_events_causation ON eventlog_events (causation_id) WHERE causation_id IS NOT NULL;

-- The events of a request. An event without a correlation id costs nothing.
CREATE INDEX eventlog_events_correlation ON eventlog_events (namespace, correlation_id)
    WHERE correlation_id IS NOT NULL;

-- The runs of a handler within a minute in a process. Each process writes a row for each of its handlers with runs.
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

-- The processes in running(), by their own report. report: a JSON object with the roles, the handlers, the runs under
-- way, the stuck runs and the lag of the event loop. A process counts as alive until three delays after the last report.
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

-- The orders of operators: who has ordered what, and how far the order is. state: RUNNING, DONE, STOPPED, FAILED.
-- request: a JSON object with the filter and the other arguments. reached: the place after the last piece that was
-- changed, written in the transaction of the piece, so that a process that goes on repeats nothing.
-- worker: the process that carries the order out; another process goes on when updated_date is too old.
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
