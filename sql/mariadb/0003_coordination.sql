-- The handlers of all instances of each service: fan-out creates notifications for all of them, no matter which process
-- runs it.
-- Either event_type or topic is set, never both. The other column is the empty string.
-- The four names together would exceed the maximum length of a key, so their digests are the key.
CREATE TABLE IF NOT EXISTS eventlog.subscriptions (
    namespace      VARCHAR(255) NOT NULL,
    handler_name   VARCHAR(255) NOT NULL,
    event_type     VARCHAR(255) NOT NULL,
    topic          VARCHAR(255) NOT NULL,
    aliases        JSON         NOT NULL,
    priority       INT          NOT NULL,
    ordered        BOOLEAN      NOT NULL,
    last_seen_date DATETIME(6)  NOT NULL,
    names_digest   BINARY(128) GENERATED ALWAYS AS (UNHEX(CONCAT(SHA2(namespace, 256), SHA2(handler_name, 256),
        SHA2(event_type, 256), SHA2(topic, 256)))) STORED INVISIBLE,

    UNIQUE KEY subscriptions_names (names_digest),
    KEY subscriptions_handler (namespace, handler_name)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- The term of each cluster lock: incremented by each new holder, and checked when an outcome is written.
-- released_term: the last term whose holder released the lock. A holder that crashes does not change it.
CREATE TABLE IF NOT EXISTS eventlog.leases (
    name          VARCHAR(255) NOT NULL PRIMARY KEY,
    term          BIGINT       NOT NULL,
    owner         VARCHAR(255) NOT NULL,
    acquired_date DATETIME(6)  NOT NULL,
    released_term BIGINT       NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Handlers that an operator has paused. ended_date is NULL while the pause lasts.
CREATE TABLE IF NOT EXISTS eventlog.pauses (
    namespace    VARCHAR(255) NOT NULL,
    handler_name VARCHAR(255) NOT NULL,
    paused_date  DATETIME(6)  NOT NULL,
    ended_date   DATETIME(6),

    PRIMARY KEY (namespace, handler_name)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- Runs that were recorded before they started, because a holder of their handler's lock had crashed. If the next holder
-- crashes too, the remaining rows are suspects: each may be the cause.
CREATE TABLE IF NOT EXISTS eventlog.started_runs (
    notification_id UUID         NOT NULL PRIMARY KEY,
    namespace       VARCHAR(255) NOT NULL,
    handler_name    VARCHAR(255) NOT NULL,
    starts          INT          NOT NULL,
    started_date    DATETIME(6)  NOT NULL,

    KEY started_runs_handler (namespace, handler_name)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO eventlog.schema_versions VALUES (3, '0003_coordination.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
