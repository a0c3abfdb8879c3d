-- One row per event and subscribed handler, with the full context of the event, so that a run reads a single row.
-- state: PENDING, FAILED (waits for its retry), BLOCKED (behind a row of its key), DYING (failed permanently, its hook
-- is pending); terminal: SUCCEEDED, EXPIRED, DEAD, SKIPPED.
-- There are no partial indexes. So is_unfinished comes before the columns of the scan, which excludes finished rows.
-- line_part: 1 PENDING, FAILED or DYING, 2 BLOCKED, 3 DEAD or EXPIRED; NULL for rows outside of key queues: finished
-- rows, and rows without an ordering key unless they are BLOCKED.
-- Both columns are generated, and invisible to SELECT *.
CREATE TABLE IF NOT EXISTS eventlog.event_notifications (
    id              CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    event_id        CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    handler_name    VARCHAR(255) NOT NULL,
    namespace       VARCHAR(255) NOT NULL,
    action_id       CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    action_name     VARCHAR(255) NOT NULL,
    action_params   JSON         NOT NULL,
    started_date    DATETIME(6)  NOT NULL,
    completion_date DATETIME(6)  NOT NULL,
    model_id        VARCHAR(255),
    model_type      VARCHAR(255),
    event_type      VARCHAR(255) NOT NULL,
    payload         JSON,
    event_date      DATETIME(6)  NOT NULL,
    state           VARCHAR(24)  NOT NULL,
    attempts        INT          NOT NULL DEFAULT 0,
    next_retry_at   DATETIME(6)  NOT NULL,
    created_date    DATETIME(6)  NOT NULL,
    updated_date    DATETIME(6)  NOT NULL,
    sequence        BIGINT       NOT NULL,
    ordering_key    VARCHAR(255),
    priority        INT          NOT NULL DEFAULT 0,
    errors          JSON         NOT NULL DEFAULT (JSON_ARRAY()),
    correlation_id  VARCHAR(255),
    causation_id    CHAR(36) CHARACTER SET ascii COLLATE ascii_bin,
    headers         JSON,
    hops            INT          NOT NULL DEFAULT 0,
    retention_from  DATETIME(6)  NOT NULL,
    is_unfinished   BOOLEAN GENERATED ALWAYS AS (state IN ('PENDING', 'FAILED', 'DYING')) STORED /*!80023 INVISIBLE */,
    line_part       TINYINT GENERATED ALWAYS AS (CASE WHEN state = 'BLOCKED' THEN 2 WHEN ordering_key IS NULL THEN NULL
        WHEN state IN ('PENDING', 'FAILED', 'DYING') THEN 1 WHEN state IN ('DEAD', 'EXPIRED') THEN 3 END)
        STORED /*!80023 INVISIBLE */,

    UNIQUE KEY event_notifications_event (event_id, handler_name),
    -- Due rows are found per handler, so the backlog of one handler does not slow down the others.
    KEY event_notifications_due (namespace, is_unfinished, handler_name, next_retry_at, sequence),
    -- The rows of each ordering key, by line_part. Finding the head reads one row of each part, and scans neither the
    -- BLOCKED rows after the head nor the DEAD rows before it.
    KEY event_notifications_line (namespace, line_part, handler_name, ordering_key, sequence)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin;

INSERT INTO eventlog.schema_versions VALUES (2, '0002_event_notifications.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
