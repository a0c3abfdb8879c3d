-- The handlers of all instances of each service: fan-out creates notifications for all of them, no matter which process
-- runs it.
-- Either event_type or topic is set, never both. The other column is the empty string.
CREATE TABLE eventlog.subscriptions (
    namespace      VARCHAR(255) NOT NULL,
    handler_name   VARCHAR(255) NOT NULL,
    event_type     VARCHAR(255) NOT NULL,
    topic          VARCHAR(255) NOT NULL,
    aliases        JSONB        NOT NULL,
    priority       INT          NOT NULL,
    ordered        BOOLEAN      NOT NULL,
    last_seen_date TIMESTAMP    NOT NULL,
    PRIMARY KEY (namespace, handler_name, event_type, topic)
);

-- The term of each cluster lock: incremented by each new holder, and checked when an outcome is written.
-- released_term: the last term whose holder released the lock. A holder that crashes does not change it.
CREATE TABLE eventlog.leases (
    name          VARCHAR(255) PRIMARY KEY,
    term          BIGINT       NOT NULL,
    owner         VARCHAR(255) NOT NULL,
    acquired_date TIMESTAMP    NOT NULL,
    released_term BIGINT       NOT NULL
);

-- Handlers that an operator has paused, until ended_date is set. An ended pause is kept: the retention of rows that
-- waited for it starts at that time.
CREATE TABLE eventlog.pauses (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    paused_date  TIMESTAMP    NOT NULL,
    ended_date   TIMESTAMP,
    PRIMARY KEY (namespace, handler_name)
);

-- Runs that were recorded before they started, because a holder of their handler's lock had crashed. If the next holder
-- crashes too, the remaining rows are suspects: each may be the cause.
CREATE TABLE eventlog.started_runs (
    notification_id UUID         PRIMARY KEY,
    namespace       VARCHAR(255) NOT NULL,
    handler_name    VARCHAR(255) NOT NULL,
    starts          INT          NOT NULL,
    started_date    TIMESTAMP    NOT NULL
);
CREATE INDEX started_runs_handler ON eventlog.started_runs (namespace, handler_name);

INSERT INTO eventlog.schema_versions VALUES (3, '0003_coordination.sql', now() AT TIME ZONE 'UTC');
