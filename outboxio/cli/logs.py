"""The log of ``outboxio worker``, set up after importing the application, unless that has set up logging itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

from rich.table import Table

from outboxio.cli.output import echo_error, echo_stderr, indented, line
from outboxio.logs import Context
from outboxio.support.log import Fields, log_of

logger = log_of("outboxio.worker")

_FIELDS = {"levelname": "level", "name": "logger", "exc_info": "traceback", "stack_info": "stack"}


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Reporter(Protocol):
    """Reports what the worker does, on a terminal or in the log."""

    def info(self, message: str, *args: object, **fields: Any) -> None:
        """Report a message with ``%`` arguments; ``fields`` are for the log."""

    def warning(self, message: str, *args: object, **fields: Any) -> None: ...

    def error(self, message: str, *args: object, **fields: Any) -> None:
        """Report why the command fails."""

    def list(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Report rows of kind (shard, handler or job), name and remark."""


def set_up(level: str | None, form: LogFormat, *, leave_alone: bool) -> Reporter:
    """Send the log to stderr, unless importing the application has set up logging, or ``leave_alone`` is true.

    ``level``: the level of outboxio's log; ``None`` is "info", or the level that the application chose. If the
    application has set up logging, the worker reports only through the log.
    """
    is_ours = not leave_alone and not logging.getLogger().handlers
    if is_ours:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_json() if form is LogFormat.JSON else _text())
        handler.addFilter(Context())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    if level is not None:
        logging.getLogger("outboxio").setLevel(level.upper())
    return TerminalReporter() if is_ours and form is LogFormat.TEXT else LogReporter(is_stderr=is_ours)


def _text() -> logging.Formatter:
    layout = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s  %(message)s"
    return logging.Formatter(layout, datefmt="%Y-%m-%d %H:%M:%S")


def _json() -> logging.Formatter:
    """One JSON object per line: time, level, logger, message, template, fields, and the traceback of an error."""
    from pythonjsonlogger.json import JsonFormatter

    class WithTemplate(JsonFormatter):
        """Adds ``template``: the message without its arguments, the same for all records of a kind."""

        def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
            super().add_fields(log_data, record, message_dict)
            if isinstance(record.msg, str):
                log_data["template"] = record.msg

    return WithTemplate("{levelname}{name}{message}", style="{", timestamp="time", rename_fields=_FIELDS)


class TerminalReporter:
    """Text on stderr, next to the log."""

    def info(self, message: str, *args: object, **fields: Any) -> None:
        echo_stderr(line(message % args))

    def warning(self, message: str, *args: object, **fields: Any) -> None:
        echo_stderr(line((message % args, "yellow")))

    def error(self, message: str, *args: object, **fields: Any) -> None:
        echo_error(message % args)

    def list(self, rows: Sequence[tuple[str, str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        for kind, name, remark in rows:
            table.add_row(kind, line((name, "cyan")), line(remark))
        echo_stderr(indented(table))


class LogReporter:
    """Records of the logger ``outboxio.worker``."""

    def __init__(self, *, is_stderr: bool) -> None:
        """``is_stderr``: the log goes to stderr, where the reason of a failure is expected."""
        self._is_stderr = is_stderr

    def info(self, message: str, *args: object, **fields: Any) -> None:
        logger.info(message, *args, **fields)

    def warning(self, message: str, *args: object, **fields: Any) -> None:
        logger.warning(message, *args, **fields)

    def error(self, message: str, *args: object, **fields: Any) -> None:
        if self._is_stderr:
            logger.error(message, *args, **fields)
        else:
            echo_error(message % args)

    def list(self, rows: Sequence[tuple[str, str, str]]) -> None:
        for kind, name, remark in rows:
            logger.info("%s %s: %s", kind, name, remark, **Fields({kind: name}))
