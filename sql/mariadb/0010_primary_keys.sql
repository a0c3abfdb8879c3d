-- A primary key for subscriptions, which only had a unique key. In a replication group, or with the setting
-- innodb_force_primary_key, a server rejects tables without a primary key, or writes to them. The names are too long
-- for a key, and MariaDB does not allow a generated column as the primary key. The column is invisible to SELECT *, so
-- processes of the previous version can run with this schema.
-- outbox.migrate() creates a new table with this key, and adds the key to an existing table before any other change.
ALTER TABLE eventlog.subscriptions ADD COLUMN id BIGINT NOT NULL AUTO_INCREMENT INVISIBLE PRIMARY KEY;

INSERT INTO eventlog.schema_versions VALUES (10, '0010_primary_keys.sql', UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE version = version;
