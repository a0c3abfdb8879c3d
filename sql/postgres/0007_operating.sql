-- For operators: statistics by minute, reports of processes, operations, and indexes for the queries of operators.
-- Processes of the previous version can run with this schema: their statements use none of these tables and indexes.

-- Building an index blocks writers. So for large tables, run the three CREATE INDEX statements with CONCURRENTLY
-- beforehand; this file then finds the indexes.

-- Both tables are locked before an index is built. The loops lock the two tables in either order. So the wait for the
-- second table is short, and the first lock is released before the next attempt, which prevents deadlocks.
DO $$
DECLARE
    usual   TEXT    := current_setting('lock_timeout');
    has_one BOOLEAN := FALSE;
BEGIN
    WHILE to_regclass('eventlog.event_notifications_dead') IS NULL
        OR to_regclass('eventlog.events_causation') IS NULL OR to_regclass('eventlog.events_correlation') IS NULL
    LOOP
        BEGIN
            LOCK TABLE eventlog.event_notifications IN SHARE MODE;
            has_one := TRUE;
            PERFORM set_config('lock_timeout', '200ms', TRUE);
            LOCK TABLE eventlog.events IN SHARE MODE;
            PERFORM set_config('lock_timeout', usual, TRUE);
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            IF NOT has_one THEN
                RAISE;
            END IF;
            has_one := FALSE;
            PERFORM pg_sleep(0.2);
        END;
    END LOOP;
END
$$;

-- DEAD and EXPIRED rows of each handler, by the time at which they ended. A row is added to the index when it becomes
-- DEAD or EXPIRED, and removed when an operator retries it, so the index costs nothing while handlers succeed.
CREATE INDEX IF NOT EXISTS event_notifications_dead
    ON eventlog.event_notifications (namespace, handler_name, updated_date, id)
    WHERE state IN ('DEAD', 'EXPIRED');

-- The events that were caused by an event.
CREATE INDEX IF NOT EXISTS events_causation ON eventlog.events (causation_id) WHERE causation_id IS NOT NULL;

-- The events of a request. Events without a correlation id cost nothing.
CREATE INDEX IF NOT EXISTS events_correlation ON eventlog.events (namespace, correlation_id)
    WHERE correlation_id IS NOT NULL;

-- The runs of a handler in a process within a minute. Each process writes a row for each handler that had runs.
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

-- The processes in running(), as they report themselves. report: a JSON object with the roles, the handlers, the
-- current runs, the stuck runs and the lag of the event loop. A process counts as alive until it has missed three
-- reports.
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

-- The operations: who has requested what, and the progress. state: RUNNING, DONE, STOPPED, FAILED.
-- request: a JSON object with the filter and the other arguments. reached: the position after the last chunk that was
-- changed, written in the transaction of the chunk, so that a process that resumes the operation repeats nothing.
-- worker: the process that runs the operation; another process resumes it when updated_date is too old.
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
