-- A primary key for subscriptions, which had only a unique key. In a replication group, or with the setting
-- innodb_force_primary_key, a server refuses a table without a primary key, or writes to it. The names are too long for
-- a key, and MariaDB refuses a generated column as the primary key. The column is invisible: processes of the former
-- version run beside it, and SELECT * leaves it out.
-- outbox.migrate() creates a new table with this key, and adds the key to an existing table before any other change.
ALTER TABLE eventlog.subscriptions ADD COLUMN id BIGINT NOT NULL AUTO_INCREMENT INVISIBLE PRIMARY KEY;

INSERT INTO eventlog.schema_versions VALUES (10, '0010_primary_keys.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
