"""The event catalogue: the event types of an outbox as an AsyncAPI document, and changes that break readers."""
