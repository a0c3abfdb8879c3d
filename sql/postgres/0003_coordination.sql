-- Which handlers the instances of every service have: fan-out serves all of them, whichever process runs it.
-- Exactly one of event_type and topic is set, the other is the empty string.
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

-- The fencing term of each cluster lock: raised by every holder, required by every outcome that is written.
-- released_term is the last term whose holder gave the lock back; one that died did not.
CREATE TABLE eventlog.leases (
    name          VARCHAR(255) PRIMARY KEY,
    term          BIGINT       NOT NULL,
    owner         VARCHAR(255) NOT NULL,
    acquired_date TIMESTAMP    NOT NULL,
    released_term BIGINT       NOT NULL
);

-- Handlers that an operator paused, until ended_date is set. A pause that is over stays here: rows that waited for its
-- end count their retention from then on.
CREATE TABLE eventlog.pauses (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    paused_date  TIMESTAMP    NOT NULL,
    ended_date   TIMESTAMP,
    PRIMARY KEY (namespace, handler_name)
);

-- Runs that were recorded before they began, because a holder of their handler's lock had died. A row that is still
-- here after the next one has died is suspected of being the cause.
CREATE TABLE eventlog.started_runs (
    notification_id UUID         PRIMARY KEY,
    namespace       VARCHAR(255) NOT NULL,
    handler_name    VARCHAR(255) NOT NULL,
    starts          INT          NOT NULL,
    started_date    TIMESTAMP    NOT NULL
);
CREATE INDEX started_runs_handler ON eventlog.started_runs (namespace, handler_name);

INSERT INTO eventlog.schema_versions VALUES (3, '0003_coordination.sql', now() AT TIME ZONE 'UTC');
