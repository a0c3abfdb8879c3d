"""Adds the fields of the current run (event, handler, attempt, model, correlation, trace) to a handler's log records.

:class:`Context` is a filter for Python's ``logging``, :func:`structlog_context` a processor for structlog, and
:func:`fields` is for other libraries. Outside of a handler they add nothing. docs/reference/logs.md lists the fields.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from outboxio.model.envelope import run_fields

__all__ = ["Context", "fields", "structlog_context"]

_OWN = "outboxio"


class Context(logging.Filter):
    """A logging filter that adds the fields of the current run to each record, and lets all records pass.

    Add it to logging handlers, not to loggers: the filter of a logger does not see the records of its child loggers.
    Records of outboxio have their own fields and are not changed, and neither are fields that a record already has.

    Example::

        stream = logging.StreamHandler()
        stream.addFilter(outboxio.logs.Context())
        stream.setFormatter(logging.Formatter("%(levelname)s %(message)s", defaults={"outboxio_event_id": "-"}))
        logging.basicConfig(level=logging.INFO, handlers=[stream])
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != _OWN and not record.name.startswith(f"{_OWN}."):
            for name, value in fields().items():
                record.__dict__.setdefault(name, value)
        return True


def structlog_context(
    logger: object, method_name: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add the fields of the current run to a structlog entry, except those that it already has.

    Example::

        structlog.configure(processors=[outboxio.logs.structlog_context, structlog.processors.JSONRenderer()])
    """
    for name, value in fields().items():
        event_dict.setdefault(name, value)
    return event_dict


def fields() -> dict[str, object]:
    """Return the fields of the current run, with the prefix ``outboxio_``; an empty dictionary outside of a handler.

    This includes plain functions that run in a thread, and tasks that the handler has started, until the handler ends.
    Ids are strings; ``outboxio_attempt`` and ``outboxio_batch_size`` are numbers.

    Example::

        loguru.logger.configure(patcher=lambda record: record["extra"].update(outboxio.logs.fields()))
    """
    return run_fields()
