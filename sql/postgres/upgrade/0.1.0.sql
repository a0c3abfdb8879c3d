-- Adds the parts that the tables of outboxio 0.1.0 lack. `outboxio migrate` runs this file before the files that follow
-- 0004_consumed_events.sql. If another tool applies the files, apply this one first, and only to tables of 0.1.0.

ALTER TABLE eventlog.leases ADD COLUMN released_term BIGINT NOT NULL DEFAULT 0;

CREATE TABLE eventlog.pauses (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    paused_date  TIMESTAMP    NOT NULL,
    ended_date   TIMESTAMP,
    PRIMARY KEY (namespace, handler_name)
);

CREATE TABLE eventlog.started_runs (
    notification_id UUID         PRIMARY KEY,
    namespace       VARCHAR(255) NOT NULL,
    handler_name    VARCHAR(255) NOT NULL,
    starts          INT          NOT NULL,
    started_date    TIMESTAMP    NOT NULL
);
CREATE INDEX started_runs_handler ON eventlog.started_runs (namespace, handler_name);
