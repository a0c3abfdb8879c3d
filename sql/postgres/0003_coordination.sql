-- The handlers of the instances of every service: fan-out serves all of them, whichever process runs the fan-out.
-- Either event_type or topic is set, never both: the unset column is the empty string.
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

-- The term of each cluster lock: raised by every new holder, required by every outcome.
-- released_term is the last term whose holder gave the lock back; a holder that dies leaves the column as it is.
CREATE TABLE eventlog.leases (
    name          VARCHAR(255) PRIMARY KEY,
    term          BIGINT       NOT NULL,
    owner         VARCHAR(255) NOT NULL,
    acquired_date TIMESTAMP    NOT NULL,
    released_term BIGINT       NOT NULL
);

-- Handlers that an operator paused, until ended_date is set. An ended pause stays in the table: rows that waited for
-- its end count their retention from that moment.
CREATE TABLE eventlog.pauses (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    paused_date  TIMESTAMP    NOT NULL,
    ended_date   TIMESTAMP,
    PRIMARY KEY (namespace, handler_name)
);

-- Runs that were recorded before they began, because a holder of their handler's lock had died. If the next holder dies
-- too, the rows that are left are suspects: each may be the cause.
CREATE TABLE eventlog.started_runs (
    notification_id UUID         PRIMARY KEY,
    namespace       VARCHAR(255) NOT NULL,
    handler_name    VARCHAR(255) NOT NULL,
    starts          INT          NOT NULL,
    started_date    TIMESTAMP    NOT NULL
);
CREATE INDEX started_runs_handler ON eventlog.started_runs (namespace, handler_name);

INSERT INTO eventlog.schema_versions VALUES (3, '0003_coordination.sql', now() AT TIME ZONE 'UTC');
