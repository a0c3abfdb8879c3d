-- Adopts the tables of Ekbatan. Afterwards they are in the state after 0002_event_notifications.sql; then run the later
-- files.
-- MariaDB commits each ALTER by itself. So each table is changed by a single ALTER, and an interrupted adoption skips
-- the tables that are done. Writers of Ekbatan wait for the ALTER of their table.

-- Rows are numbered in the order of the primary key.
ALTER TABLE eventlog.events
    CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
    MODIFY id           UUID NOT NULL,
    MODIFY action_id    UUID NOT NULL,
    ADD COLUMN sequence BIGINT NOT NULL AUTO_INCREMENT,
    ADD COLUMN ordering_key   VARCHAR(255),
    ADD COLUMN topic          VARCHAR(255),
    ADD COLUMN source         VARCHAR(255),
    ADD COLUMN correlation_id VARCHAR(255),
    ADD COLUMN causation_id   UUID,
    ADD COLUMN headers        JSON,
    ADD COLUMN available_at   DATETIME(6),
    ADD COLUMN hops           INT NOT NULL DEFAULT 0,
    ADD COLUMN waiting_topic  VARCHAR(255) GENERATED ALWAYS AS (CASE WHEN delivered THEN NULL ELSE topic END)
        STORED INVISIBLE,
    DROP KEY ix_events_undelivered,
    DROP KEY ix_events_action_id,
    ADD UNIQUE KEY events_sequence (sequence),
    ADD KEY idx_events_action_id (action_id),
    ADD KEY events_undelivered (namespace, delivered, event_type, sequence),
    ADD KEY events_undelivered_topic (namespace, waiting_topic, sequence);

ALTER TABLE eventlog.event_notifications
    CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
    MODIFY id        UUID NOT NULL,
    MODIFY event_id  UUID NOT NULL,
    MODIFY action_id UUID NOT NULL,
    MODIFY attempts  INT NOT NULL DEFAULT 0,
    ADD COLUMN sequence       BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN ordering_key   VARCHAR(255),
    ADD COLUMN priority       INT NOT NULL DEFAULT 0,
    ADD COLUMN errors         JSON NOT NULL DEFAULT '[]',
    ADD COLUMN correlation_id VARCHAR(255),
    ADD COLUMN causation_id   UUID,
    ADD COLUMN headers        JSON,
    ADD COLUMN hops           INT NOT NULL DEFAULT 0,
    ADD COLUMN retention_from DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    ADD COLUMN is_unfinished  BOOLEAN GENERATED ALWAYS AS (state IN ('PENDING', 'FAILED', 'DYING')) STORED INVISIBLE,
    ADD COLUMN line_part      TINYINT GENERATED ALWAYS AS (CASE WHEN state = 'BLOCKED' THEN 2
        WHEN ordering_key IS NULL THEN NULL WHEN state IN ('PENDING', 'FAILED', 'DYING') THEN 1
        WHEN state IN ('DEAD', 'EXPIRED') THEN 3 END) STORED INVISIBLE,
    DROP KEY ix_event_notifications_due,
    DROP KEY uq_event_notifications_event_handler,
    ADD UNIQUE KEY event_notifications_event (event_id, handler_name),
    ADD KEY event_notifications_line (namespace, line_part, handler_name, ordering_key, sequence);

-- Only unfinished rows need correct values: the sequence of the event, and the retry window, which starts at its date.
UPDATE eventlog.event_notifications n LEFT JOIN eventlog.events e ON e.id = n.event_id
SET n.sequence = COALESCE(e.sequence, 0), n.retention_from = n.event_date
WHERE n.state IN ('PENDING', 'FAILED');

CREATE TABLE IF NOT EXISTS eventlog.schema_versions (
    version      INT          NOT NULL PRIMARY KEY,
    file         VARCHAR(255) NOT NULL,
    applied_date DATETIME(6)  NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

INSERT INTO eventlog.schema_versions
VALUES (1, '0001_events.sql', UTC_TIMESTAMP(6)), (2, '0002_event_notifications.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
