"""The warnings and errors in the log of a test."""

from __future__ import annotations

import logging

import pytest

#: Logs that the event loop, or the whole process, stood still. A busy machine stops processes for seconds.
STANDSTILLS = "outboxio.loops.standstill"


def complaints(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """The messages of a level and above, except for standstills."""
    return [record.getMessage() for record in caplog.records if record.levelno >= level and record.name != STANDSTILLS]
