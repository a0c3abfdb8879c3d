"""The root of all errors."""


class OutboxError(Exception):
    """The root of all errors of outboxio, except the errors that a handler raises, such as ``RetryAfter``."""
