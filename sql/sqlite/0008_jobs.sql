-- Jobs: functions that run at set moments, once in the cluster for each moment.
-- Processes of the former version run beside this table: their statements do not use the table.

-- next_date: the next moment of the schedule. due_date: when a process has to look at the row: at the moment with its
-- jitter, at a retry, or when a run must have ended. term: rises with each run, and a run ends the row only under its
-- own term. lease, lease_term: the cluster lock under which the present run began. state: WAITING, RUNNING, RETRYING.
-- result: SUCCEEDED, FAILED, TIMED_OUT, INTERRUPTED; of the last run, with its error.
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
