"""Rows with an unreadable id: no outcome can be written for such a row, so dispatch passes over the row."""

from __future__ import annotations

from outboxio.support.log import log_of

logger = log_of(__name__)

MOST_REMEMBERED = 1000


class LeftAlone:
    """Logs each such row once."""

    def __init__(self) -> None:
        self._said: dict[object, None] = {}

    def add(self, row_id: object, handler_name: str) -> None:
        if row_id in self._said:
            return
        if len(self._said) >= MOST_REMEMBERED:
            del self._said[next(iter(self._said))]
        self._said[row_id] = None
        logger.error(
            "the notification with id %s of handler %r is left alone, for its id is no UUID: correct it in "
            "event_notifications, or remove the row", repr(row_id), handler_name, handler=handler_name,
        )  # fmt: skip
