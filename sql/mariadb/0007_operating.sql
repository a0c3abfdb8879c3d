-- For operators: statistics by minute, reports of processes, operations, and indexes for the queries of operators.
-- Processes of the previous version can run with this schema: their statements use none of these tables and indexes.

-- DEAD and EXPIRED rows of each handler, by the time at which they ended. The index entry of a row moves with its
-- state.
-- On MySQL, this index has columns that are NULL for all other rows; on MariaDB, such an index can keep orphaned
-- entries when the server is killed.
ALTER TABLE eventlog.event_notifications
    ADD KEY event_notifications_dead (namespace, state, handler_name, updated_date, id), ALGORITHM=INPLACE, LOCK=NONE;

-- The events that were caused by an event.
ALTER TABLE eventlog.events ADD KEY events_causation (causation_id), ALGORITHM=INPLACE, LOCK=NONE;

-- The events of a request.
ALTER TABLE eventlog.events ADD KEY events_correlation (namespace, correlation_id), ALGORITHM=INPLACE, LOCK=NONE;

-- The runs of a handler in a process within a minute. Each process writes a row for each handler that had runs.
-- durations and lags are histograms: JSON arrays of counts (outboxio/statistics/buckets.py).
-- duration_us: the sum over all runs, in microseconds.
CREATE TABLE IF NOT EXISTS eventlog.handler_minutes (
    namespace    VARCHAR(255) NOT NULL,
    minute_date  DATETIME(6)  NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    instance     VARCHAR(255) NOT NULL,
    succeeded    BIGINT       NOT NULL,
    failed       BIGINT       NOT NULL,
    dead         BIGINT       NOT NULL,
    expired      BIGINT       NOT NULL,
    skipped      BIGINT       NOT NULL,
    duration_us  BIGINT       NOT NULL,
    durations    JSON         NOT NULL,
    lags         JSON         NOT NULL,

    PRIMARY KEY (namespace, minute_date, handler_name, instance)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- The processes in running(), as they report themselves. report: a JSON object with the roles, the handlers, the
-- current runs, the stuck runs and the lag of the event loop. A process counts as alive until it has missed three
-- reports.
CREATE TABLE IF NOT EXISTS eventlog.instance_reports (
    namespace      VARCHAR(255) NOT NULL,
    instance       VARCHAR(255) NOT NULL,
    version        VARCHAR(64)  NOT NULL,
    started_date   DATETIME(6)  NOT NULL,
    last_seen_date DATETIME(6)  NOT NULL,
    delay_seconds  INT          NOT NULL,
    report         JSON         NOT NULL,

    PRIMARY KEY (namespace, instance)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- The operations: who has requested what, and the progress. state: RUNNING, DONE, STOPPED, FAILED.
-- request: a JSON object with the filter and the other arguments. reached: the position after the last chunk that was
-- changed, written in the transaction of the chunk, so that a process that resumes the operation repeats nothing.
-- worker: the process that runs the operation; another process resumes it when updated_date is too old.
CREATE TABLE IF NOT EXISTS eventlog.operations (
    id            UUID         NOT NULL PRIMARY KEY,
    namespace     VARCHAR(255) NOT NULL,
    kind          VARCHAR(24)  NOT NULL,
    state         VARCHAR(24)  NOT NULL,
    request       JSON         NOT NULL,
    actor         VARCHAR(255) NOT NULL,
    origin        VARCHAR(24)  NOT NULL,
    reason        VARCHAR(1000),
    matched       BIGINT       NOT NULL,
    done          BIGINT       NOT NULL,
    refused       BIGINT       NOT NULL,
    reached       JSON,
    worker        VARCHAR(255) NOT NULL,
    stop_ordered  BOOLEAN      NOT NULL,
    created_date  DATETIME(6)  NOT NULL,
    updated_date  DATETIME(6)  NOT NULL,
    finished_date DATETIME(6),
    error         VARCHAR(1000),

    KEY operations_created (namespace, created_date, id),
    KEY operations_running (namespace, state, updated_date)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO eventlog.schema_versions VALUES (7, '0007_operating.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
