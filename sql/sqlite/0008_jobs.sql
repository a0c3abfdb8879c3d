-- Jobs: functions that run on a schedule, once in the cluster for each scheduled time.
-- Processes of the previous version can run with this schema: their statements do not use this table.

-- next_date: the next scheduled time. due_date: when a process must check the row: at the scheduled time plus jitter,
-- at a retry, or when a run must have finished. term: incremented by each run, which can only finish the row under its
-- own term. lease, lease_term: the cluster lock under which the current run started. state: WAITING, RUNNING, RETRYING.
-- result: the result of the last run, with its error: SUCCEEDED, FAILED, TIMED_OUT, INTERRUPTED.
CREATE TABLE IF NOT EXISTS eventlog_jobs (
    namespace     TEXT NOT NULL,
    job_name      TEXT NOT NULL,
    schedule      TEXT NOT NULL,
    state         TEXT  NOT NULL,
    next_date     TEXT    NOT NULL,
    due_date      TEXT    NOT NULL,
    term          INTEGER       NOT NULL,
    attempts      INTEGER          NOT NULL,
    moment_date   TEXT,
    lease         TEXT NOT NULL,
    lease_term    INTEGER       NOT NULL,
    instance      TEXT NOT NULL,
    started_date  TEXT,
    finished_date TEXT,
    result        TEXT,
    error         TEXT,
    succeeded     INTEGER       NOT NULL,
    failed        INTEGER       NOT NULL,
    missed        INTEGER       NOT NULL,
    paused_date   TEXT,
    ordered_date  TEXT,
    PRIMARY KEY (namespace, job_name)
);
CREATE INDEX IF NOT EXISTS eventlog_jobs_due ON eventlog_jobs (namespace, due_date);

INSERT INTO eventlog_schema_versions VALUES (8, '0008_jobs.sql', strftime('%Y-%m-%d %H:%M:%f000', 'now'));
