-- For operators: figures by minute, reports of processes, orders of operators, and indexes for what operators ask.
-- Processes of the former version run beside these parts: their statements use none of the tables and indexes.

-- DEAD and EXPIRED rows of each handler, by the moment of their end. A row enters the index when the row ends badly, and
-- leaves the index when an operator retries the row, so the index costs nothing where handlers succeed.
-- The build of an index keeps writers waiting. So on a large table, run the three statements with CREATE INDEX
-- CONCURRENTLY before this file.
CREATE INDEX IF NOT EXISTS event_notifications_dead
    ON eventlog.event_notifications (namespace, handler_name, updated_date, id)
    WHERE state IN ('DEAD', 'EXPIRED');

-- The events that an event has caused.
CREATE INDEX IF NOT EXISTS events_causation ON eventlog.events (causation_id) WHERE causation_id IS NOT NULL;

-- The events of a request. An event without a correlation id costs nothing.
CREATE INDEX IF NOT EXISTS events_correlation ON eventlog.events (namespace, correlation_id)
    WHERE correlation_id IS NOT NULL;

-- The runs of a handler within a minute in a process. Each process writes a row for each of its handlers with runs.
-- durations and lags are histograms: JSON arrays of counts (outboxio/statistics/buckets.py).
-- duration_us: the sum over all runs, in microseconds.
CREATE TABLE eventlog.handler_minutes (
    namespace    VARCHAR(255) NOT NULL,
    minute_date  TIMESTAMP    NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    instance     VARCHAR(255) NOT NULL,
    succeeded    BIGINT       NOT NULL,
    failed       BIGINT       NOT NULL,
    dead         BIGINT       NOT NULL,
    expired      BIGINT       NOT NULL,
    skipped      BIGINT       NOT NULL,
    duration_us  BIGINT       NOT NULL,
    durations    JSONB        NOT NULL,
    lags         JSONB        NOT NULL,
    PRIMARY KEY (namespace, minute_date, handler_name, instance)
);

-- The processes in running(), by their own report. report: a JSON object with the roles, the handlers, the runs under
-- way, the stuck runs and the lag of the event loop. A process counts as alive until three delays after the last report.
CREATE TABLE eventlog.instance_reports (
    namespace      VARCHAR(255) NOT NULL,
    instance       VARCHAR(255) NOT NULL,
    version        VARCHAR(64)  NOT NULL,
    started_date   TIMESTAMP    NOT NULL,
    last_seen_date TIMESTAMP    NOT NULL,
    delay_seconds  INT          NOT NULL,
    report         JSONB        NOT NULL,
    PRIMARY KEY (namespace, instance)
);

-- The orders of operators: who has ordered what, and how far the order is. state: RUNNING, DONE, STOPPED, FAILED.
-- request: a JSON object with the filter and the other arguments. reached: the place after the last piece that was
-- changed, written in the transaction of the piece, so that a process that goes on repeats nothing.
-- worker: the process that carries the order out; another process goes on when updated_date is too old.
CREATE TABLE eventlog.operations (
    id            UUID         PRIMARY KEY,
    namespace     VARCHAR(255) NOT NULL,
    kind          VARCHAR(24)  NOT NULL,
    state         VARCHAR(24)  NOT NULL,
    request       JSONB        NOT NULL,
    actor         VARCHAR(255) NOT NULL,
    origin        VARCHAR(24)  NOT NULL,
    reason        VARCHAR(1000),
    matched       BIGINT       NOT NULL,
    done          BIGINT       NOT NULL,
    refused       BIGINT       NOT NULL,
    reached       JSONB,
    worker        VARCHAR(255) NOT NULL,
    stop_ordered  BOOLEAN      NOT NULL,
    created_date  TIMESTAMP    NOT NULL,
    updated_date  TIMESTAMP    NOT NULL,
    finished_date TIMESTAMP,
    error         VARCHAR(1000)
);
CREATE INDEX operations_created ON eventlog.operations (namespace, created_date, id);
CREATE INDEX operations_running ON eventlog.operations (namespace, state, updated_date);

INSERT INTO eventlog.schema_versions VALUES (7, '0007_operating.sql', now() AT TIME ZONE 'UTC');
