"""The values of the outbox: frozen data and pure functions without awaits."""
