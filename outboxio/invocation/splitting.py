"""Splitting: the events of a batch that is called again in halves, because a call has failed."""

from __future__ import annotations

from typing import Any

import msgspec

from outboxio.runs.run import Run

_encode = msgspec.json.Encoder().encode


class DecodedEvents:
    """Events that need not be decoded again, because the handler has not changed the events.

    To decode ten thousand events anew for each of fourteen halvings takes longer than all the rest, and the garbage
    keeps the event loop waiting. But a call that failed may have changed lists and mappings in an event, and the next
    call must not see the change. Encoding an event shows a change, and leaves no garbage.
    """

    def __init__(self) -> None:
        self._events: dict[Run, tuple[Any, int]] = {}

    def keep(self, run: Run, event: Any) -> None:
        """Keep a row's event in the present state."""
        self._events[run] = event, hash(_encode(event))

    def take(self, run: Run) -> Any:
        """A row's event if the event is known and unchanged, else ``None``."""
        event, before = self._events.get(run, (None, 0))
        if event is None:
            return None
        try:
            is_unchanged = hash(_encode(event)) == before
        except Exception:  # the handler has put a value into the event that cannot be encoded
            is_unchanged = False
        return event if is_unchanged else None
