"""The handler's own log records get the fields of the run: event, handler, attempt, model, correlation, trace.

:class:`Context` is a filter for Python's ``logging``, :func:`structlog_context` a processor for structlog, and
:func:`fields` is for all other libraries. Outside of a handler all three add nothing. docs/reference/logs.md lists
the fields.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from outboxio.model.envelope import run_fields

__all__ = ["Context", "fields", "structlog_context"]

_OWN = "outboxio"


class Context(logging.Filter):
    """Adds the fields of the run under way to each record. Every record passes.

    Add the filter to handlers of ``logging``, not to loggers: a filter of a logger does not see the records of the
    loggers below. Records of outboxio have their own fields and stay as they are, and so do fields that a record has
    already.

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
    """A processor for structlog: adds the fields of the run under way, unless the entry has the field already.

    Example::

        structlog.configure(processors=[outboxio.logs.structlog_context, structlog.processors.JSONRenderer()])
    """
    for name, value in fields().items():
        event_dict.setdefault(name, value)
    return event_dict


def fields() -> dict[str, object]:
    """The fields of the run under way, with the prefix ``outboxio_``; an empty dictionary outside of a handler.

    In a plain function that runs in a thread, and in tasks that the handler has started, the run is under way until the
    handler has ended. Ids are texts, ``outboxio_attempt`` and ``outboxio_batch_size`` are numbers.

    Example::

        loguru.logger.configure(patcher=lambda record: record["extra"].update(outboxio.logs.fields()))
    """
    return run_fields()
