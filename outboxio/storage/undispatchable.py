"""Rows with a malformed id, which dispatch skips because no outcome could be written."""

from __future__ import annotations

from outboxio.support.log import log_of

logger = log_of(__name__)

MAX_REMEMBERED = 1000


class UndispatchableRows:
    """Logs each such row once."""

    def __init__(self) -> None:
        self._logged: dict[object, None] = {}

    def add(self, row_id: object, handler_name: str) -> None:
        if row_id in self._logged:
            return
        if len(self._logged) >= MAX_REMEMBERED:
            del self._logged[next(iter(self._logged))]
        self._logged[row_id] = None
        logger.error(
            "skipping notification %s of handler %r, because its id is not a UUID; fix the id in event_notifications, "
            "or delete the row", repr(row_id), handler_name, handler=handler_name,
        )  # fmt: skip
