"""The warnings and errors in the log of a test."""

from __future__ import annotations

import logging

import pytest

#: Logs that the event loop or the whole process was blocked. A busy machine stops processes for seconds.
BLOCKED_LOOP_LOGGER = "outboxio.loops.blocked_loop"


def logged_problems(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """Return the messages of a level and above, except for those about a blocked event loop."""
    records = [record for record in caplog.records if record.levelno >= level]
    return [record.getMessage() for record in records if record.name != BLOCKED_LOOP_LOGGER]
