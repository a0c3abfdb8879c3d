"""The data types of the outbox: immutable structs, and pure functions without awaits."""
