"""The log of ``outboxio worker``: set up after the import of the application, unless the application has a log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

from rich.table import Table

from outboxio.cli.answer import indented, line, say_aside, say_error
from outboxio.logs import Context
from outboxio.support.log import Fields, log_of

logger = log_of("outboxio.worker")

_FIELDS = {"levelname": "level", "name": "logger", "exc_info": "traceback", "stack_info": "stack"}


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Teller(Protocol):
    """Reports the worker's steps to people on a terminal, or as records of the log."""

    def say(self, message: str, *args: object, **fields: Any) -> None:
        """A message with ``%`` arguments; ``fields`` are for the log."""

    def warn(self, message: str, *args: object, **fields: Any) -> None: ...

    def fail(self, message: str, *args: object, **fields: Any) -> None:
        """The reason why the answer of the command is no."""

    def list(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Rows of a kind (shard or handler), a name and a remark."""


def set_up(level: str | None, form: LogFormat, *, leave_alone: bool) -> Teller:
    """Send the log to stderr, unless the application has set up logging when imported, or ``leave_alone`` is true.

    ``level`` is the level of outboxio's log; ``None`` is "info", or the level that the application chose. If the
    application has set up logging, the worker reports through the log only.
    """
    is_ours = not leave_alone and not logging.getLogger().handlers
    if is_ours:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_json() if form is LogFormat.JSON else _text())
        handler.addFilter(Context())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    if level is not None:
        logging.getLogger("outboxio").setLevel(level.upper())
    return OnTerminal() if is_ours and form is LogFormat.TEXT else InLog(is_stderr=is_ours)


def _text() -> logging.Formatter:
    layout = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s  %(message)s"
    return logging.Formatter(layout, datefmt="%Y-%m-%d %H:%M:%S")


def _json() -> logging.Formatter:
    """A JSON object per line: time, level, logger, message, template, the fields, and the traceback of an error."""
    from pythonjsonlogger.json import JsonFormatter

    class WithTemplate(JsonFormatter):
        """``template`` is the message without its arguments, which is the same for all entries of a kind."""

        def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
            super().add_fields(log_data, record, message_dict)
            if isinstance(record.msg, str):
                log_data["template"] = record.msg

    return WithTemplate("{levelname}{name}{message}", style="{", timestamp="time", rename_fields=_FIELDS)


class OnTerminal:
    """Text on stderr, beside the log."""

    def say(self, message: str, *args: object, **fields: Any) -> None:
        say_aside(line(message % args))

    def warn(self, message: str, *args: object, **fields: Any) -> None:
        say_aside(line((message % args, "yellow")))

    def fail(self, message: str, *args: object, **fields: Any) -> None:
        say_error(message % args)

    def list(self, rows: Sequence[tuple[str, str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        for kind, name, remark in rows:
            table.add_row(kind, line((name, "cyan")), line(remark))
        say_aside(indented(table))


class InLog:
    """Records of the logger ``outboxio.worker``."""

    def __init__(self, *, is_stderr: bool) -> None:
        """``is_stderr``: the records surely go to stderr, where the reason of a no is expected."""
        self._is_stderr = is_stderr

    def say(self, message: str, *args: object, **fields: Any) -> None:
        logger.info(message, *args, **fields)

    def warn(self, message: str, *args: object, **fields: Any) -> None:
        logger.warning(message, *args, **fields)

    def fail(self, message: str, *args: object, **fields: Any) -> None:
        if self._is_stderr:
            logger.error(message, *args, **fields)
        else:
            say_error(message % args)

    def list(self, rows: Sequence[tuple[str, str, str]]) -> None:
        for kind, name, remark in rows:
            logger.info("%s %s: %s", kind, name, remark, **Fields({kind: name}))
