-- One row per event and subscribed handler, with the full context of the event, so that a run reads a single row.
-- state: PENDING, FAILED (waits for its retry), BLOCKED (behind a row of its key), DYING (failed permanently, its hook
-- is pending); terminal: SUCCEEDED, EXPIRED, DEAD, SKIPPED.
CREATE TABLE eventlog.event_notifications (
    id              UUID         PRIMARY KEY,
    event_id        UUID         NOT NULL,
    handler_name    VARCHAR(255) NOT NULL,
    namespace       VARCHAR(255) NOT NULL,
    action_id       UUID         NOT NULL,
    action_name     VARCHAR(255) NOT NULL,
    action_params   JSONB        NOT NULL,
    started_date    TIMESTAMP    NOT NULL,
    completion_date TIMESTAMP    NOT NULL,
    model_id        VARCHAR(255),
    model_type      VARCHAR(255),
    event_type      VARCHAR(255) NOT NULL,
    payload         JSONB,
    event_date      TIMESTAMP    NOT NULL,
    state           VARCHAR(24)  NOT NULL,
    attempts        INT          NOT NULL DEFAULT 0,
    next_retry_at   TIMESTAMP    NOT NULL,
    created_date    TIMESTAMP    NOT NULL,
    updated_date    TIMESTAMP    NOT NULL,
    sequence        BIGINT       NOT NULL,
    ordering_key    VARCHAR(255),
    priority        INT          NOT NULL DEFAULT 0,
    errors          JSONB        NOT NULL DEFAULT '[]',
    correlation_id  VARCHAR(255),
    causation_id    UUID,
    headers         JSONB,
    hops            INT          NOT NULL DEFAULT 0,
    retention_from  TIMESTAMP    NOT NULL,
    UNIQUE (event_id, handler_name)
);

-- Due rows are found per handler, so the backlog of one handler does not slow down the others.
CREATE INDEX event_notifications_due
    ON eventlog.event_notifications (namespace, handler_name, next_retry_at, sequence)
    WHERE state IN ('PENDING', 'FAILED', 'DYING');

-- The key queues: the unfinished rows of each ordering key, in order, and BLOCKED rows without a key. The index has no
-- other rows of unordered handlers.
CREATE INDEX event_notifications_line
    ON eventlog.event_notifications (namespace, handler_name, ordering_key, sequence)
    WHERE state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') AND (ordering_key IS NOT NULL OR state = 'BLOCKED');

-- DEAD and EXPIRED rows of ordered handlers, which may park their key. They have a separate index, because there may be
-- many of them if they do not park keys.
CREATE INDEX event_notifications_parked
    ON eventlog.event_notifications (namespace, handler_name, ordering_key, sequence)
    WHERE state IN ('DEAD', 'EXPIRED') AND ordering_key IS NOT NULL;

INSERT INTO eventlog.schema_versions VALUES (2, '0002_event_notifications.sql', now() AT TIME ZONE 'UTC');
