"""Payloads: from an event object to stored JSON and back, for each kind of class and each version of an event."""
