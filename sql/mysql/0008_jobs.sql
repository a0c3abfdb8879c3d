-- Jobs: functions that run on a schedule, once in the cluster for each scheduled time.
-- Processes of the previous version can run with this schema: their statements do not use this table.

-- next_date: the next scheduled time. due_date: when a process must check the row: at the scheduled time plus jitter,
-- at a retry, or when a run must have finished. term: incremented by each run, which can only finish the row under its
-- own term. lease, lease_term: the cluster lock under which the current run started. state: WAITING, RUNNING, RETRYING.
-- result: the result of the last run, with its error: SUCCEEDED, FAILED, TIMED_OUT, INTERRUPTED.
CREATE TABLE IF NOT EXISTS eventlog.jobs (
    namespace     VARCHAR(255) NOT NULL,
    job_name      VARCHAR(255) NOT NULL,
    schedule      VARCHAR(255) NOT NULL,
    state         VARCHAR(24)  NOT NULL,
    next_date     DATETIME(6)    NOT NULL,
    due_date      DATETIME(6)    NOT NULL,
    term          BIGINT       NOT NULL,
    attempts      INT          NOT NULL,
    moment_date   DATETIME(6),
    lease         VARCHAR(255) NOT NULL,
    lease_term    BIGINT       NOT NULL,
    instance      VARCHAR(255) NOT NULL,
    started_date  DATETIME(6),
    finished_date DATETIME(6),
    result        VARCHAR(24),
    error         LONGTEXT,
    succeeded     BIGINT       NOT NULL,
    failed        BIGINT       NOT NULL,
    missed        BIGINT       NOT NULL,
    paused_date   DATETIME(6),
    ordered_date  DATETIME(6),
    PRIMARY KEY (namespace, job_name),
    KEY jobs_due (namespace, due_date)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin;

INSERT INTO eventlog.schema_versions VALUES (8, '0008_jobs.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
