-- Jobs: functions that run at set moments, once in the cluster for each moment.
-- Processes of the former version run beside this table: their statements do not use the table.

-- next_date: the next moment of the schedule. due_date: when a process has to look at the row: at the moment with its
-- jitter, at a retry, or when a run must have ended. term: rises with each run, and a run ends the row only under its
-- own term. lease, lease_term: the cluster lock under which the present run began. state: WAITING, RUNNING, RETRYING.
-- result: SUCCEEDED, FAILED, TIMED_OUT, INTERRUPTED; of the last run, with its error.
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
