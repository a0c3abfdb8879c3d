"""The version of outboxio."""

__version__ = "0.1.0"
