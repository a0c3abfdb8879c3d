"""Loops: rounds that repeat, the event loop that owns an outbox, an event loop in a thread, and standstills."""
