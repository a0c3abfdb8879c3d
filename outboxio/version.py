"""The version of outboxio."""

__version__ = "0.2.0"
