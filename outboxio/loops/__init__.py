"""Polling loops, the event loop that an outbox is bound to, a background event loop, and blocked-loop detection."""
