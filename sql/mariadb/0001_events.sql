-- outboxio, MariaDB 10.11 or later: the outbox itself.
-- Run the files of this directory in order. MariaDB commits each CREATE immediately, so an interrupted file can simply
-- be run again. Each file records that it has been applied.
-- All tables are in a separate database, eventlog, of which a server has only one. Your application's user needs
--   GRANT CREATE, DROP, ALTER, INDEX, SELECT, INSERT, UPDATE, DELETE ON eventlog.* TO ...;
-- if an administrator runs these files, the last four are enough.

CREATE DATABASE IF NOT EXISTS eventlog CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- The files of this directory that have been applied.
CREATE TABLE IF NOT EXISTS eventlog.schema_versions (
    version      INT          NOT NULL PRIMARY KEY,
    file         VARCHAR(255) NOT NULL,
    applied_date DATETIME(6)  NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- One row per emitted event, with the full context of the action. An action without events has one row too, the
-- sentinel event: its model_id, model_type, event_type and payload are NULL.
-- Dates are in UTC, without a time zone. Names, keys and ids are compared byte by byte.
-- There are no partial indexes. So delivered comes before the columns that fan-out scans, which excludes delivered rows
-- from the scan.
CREATE TABLE IF NOT EXISTS eventlog.events (
    id              UUID     NOT NULL PRIMARY KEY,
    namespace       VARCHAR(255) NOT NULL,
    action_id       UUID     NOT NULL,
    action_name     VARCHAR(255) NOT NULL,
    action_params   JSON         NOT NULL,
    started_date    DATETIME(6)  NOT NULL,
    completion_date DATETIME(6)  NOT NULL,
    model_id        VARCHAR(255),
    model_type      VARCHAR(255),
    event_type      VARCHAR(255),
    payload         JSON,
    event_date      DATETIME(6)  NOT NULL,
    delivered       BOOLEAN      NOT NULL,
    sequence        BIGINT       NOT NULL AUTO_INCREMENT,
    ordering_key    VARCHAR(255),
    topic           VARCHAR(255),
    source          VARCHAR(255),
    correlation_id  VARCHAR(255),
    causation_id    UUID    ,
    headers         JSON,
    available_at    DATETIME(6),
    hops            INT          NOT NULL DEFAULT 0,
    waiting_topic   VARCHAR(255) GENERATED ALWAYS AS (CASE WHEN delivered THEN NULL ELSE topic END)
        STORED INVISIBLE,

    UNIQUE KEY events_sequence (sequence),
    KEY idx_events_action_id (action_id),
    -- Fan-out scans each subscribed type separately. Three kinds of rows cost nothing: rows of unsubscribed types, rows
    -- of other services, and delivered rows.
    KEY events_undelivered (namespace, delivered, event_type, sequence),
    -- The same for subscriptions to a topic. Most events have no topic, so their index entry does not move at delivery.
    KEY events_undelivered_topic (namespace, waiting_topic, sequence)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO eventlog.schema_versions VALUES (1, '0001_events.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
