"""The documents of an event as pages show them: as stored, and at most 64 KB."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from uuid import UUID

import msgspec
from msgspec import Raw, Struct

from outboxio.dashboard.page_request import PageRequest
from outboxio.health.reasons import without_error
from outboxio.model.notification import NotificationRecord, State
from outboxio.support.clock import naive_utc, utc_now
from outboxio.support.codec import is_list, is_object, made_from

MAX_SHOWN = 65_536  # characters of a document on a page
_MAX_INDENTED = 262_144  # characters; a longer text is shown as it is stored


class Document(Struct, frozen=True, kw_only=True):
    """A JSON document, such as a payload."""

    value: Raw | None
    """The document, with all digits of its numbers; ``None`` if it is larger than 64 KB or not valid JSON."""
    text: str | None
    """The start of the text, if there is no value."""
    characters: int
    """The length of the whole text."""

    @property
    def shown(self) -> str:
        """The text to display, at most 64 KB."""
        return _indented(bytes(self.value).decode()) if self.value is not None else self.text or ""

    @property
    def is_cut(self) -> bool:
        """True if the page shows only part of the text."""
        return self.characters > MAX_SHOWN

    @property
    def is_empty(self) -> bool:
        """True for ``{}`` and ``null``."""
        return self.value is not None and bytes(self.value).strip() in (b"{}", b"null")


def document(text: str) -> Document:
    """Return the document of a JSON text."""
    if len(text) > MAX_SHOWN:
        return Document(value=None, text=text[:MAX_SHOWN], characters=len(text))
    try:
        value = msgspec.json.decode(text, type=Raw).copy()
        msgspec.json.format(value)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return Document(value=None, text=text, characters=len(text))
    return Document(value=value, text=None, characters=len(text))


async def texts_of(request: PageRequest, event_id: UUID, shard: str) -> Mapping[str, str]:
    """Return the redacted texts of an event's documents; empty without the right to read payloads."""
    return await request.admin.documents(event_id, shard=shard) if request.access.may("payloads") else {}


async def documents_of(request: PageRequest, event_id: UUID, shard: str) -> Mapping[str, Document]:
    """Return an event's documents by name; empty without the right to read payloads."""
    return {name: document(text) for name, text in (await texts_of(request, event_id, shard)).items()}


def _indented(text: str) -> str:
    try:
        return msgspec.json.format(text, indent=2) if len(text) <= _MAX_INDENTED else text
    except (msgspec.DecodeError, RecursionError):
        return text


# --- a notification on the page of its event: the state with its explanation, and all stored errors ---


_LATE = timedelta(minutes=1)
_DUE = (State.PENDING, State.FAILED, State.DYING)


class Delivery(NotificationRecord, frozen=True, kw_only=True):
    """A notification of the event, without its documents.

    ``errors``: the newest first, at most 10, each with ``attempt``, ``time``, ``ran`` (seconds), ``type``, ``message``
    and ``traceback``; the last two are ``None`` without the right to read payloads.
    """

    reason: str | None
    """Why an unfinished notification has not run."""
    due: datetime | None
    """The time of the next run; ``None`` if none is planned."""
    is_overdue: bool
    """True if the notification has been due for more than a minute, by the clock of this machine."""
    is_requested: bool
    """True if the address of the page contains this notification's id."""

    in_json = (
        "id", "handler_name", "state", "attempts", "due", "reason", "is_overdue", "created_date", "updated_date",
        "ordering_key", "priority", "partition_number", "errors", "is_requested", "shard",
    )  # fmt: skip

    @property
    def may_retry(self) -> bool:
        return self.state in (State.DEAD, State.EXPIRED, State.FAILED)

    @property
    def may_run(self) -> bool:
        """True if a run may be in progress, which is certain only in the process that runs it."""
        return self.due is not None and self.due <= utc_now()

    @property
    def may_skip(self) -> bool:
        return self.state not in (State.SUCCEEDED, State.SKIPPED)


def delivery_of(
    record: NotificationRecord, reason: str | None, *, shows_payloads: bool, is_requested: bool
) -> Delivery:
    """Return the notification for a page. ``shows_payloads``: False leaves out messages and tracebacks."""
    entries: object = record.errors
    due = record.next_retry_at if record.state in _DUE else None
    errors = [_error(entry, shows_payloads) for entry in entries[::-1]] if is_list(entries) else []
    is_overdue = due is not None and due < utc_now() - _LATE
    reason = reason if shows_payloads or reason is None else without_error(reason)
    return made_from(
        record, Delivery, due=due, is_overdue=is_overdue, errors=errors, is_requested=is_requested, reason=reason
    )


def _error(entry: object, shows_payloads: bool) -> dict[str, object]:
    """Return an entry of the column ``errors``, which another tool may have written."""
    parts: Mapping[str, object] = entry if is_object(entry) else {"type": "Unknown", "message": entry}
    attempt = parts.get("attempt")
    return {
        "attempt": attempt if isinstance(attempt, int) else None,
        "time": _time(parts.get("time")),
        "ran": float(ran) if isinstance(ran := parts.get("ran"), int | float) and not isinstance(ran, bool) else None,
        "type": _text(parts.get("type")) or "Unknown",
        "message": _text(parts.get("message")) if shows_payloads else None,
        "traceback": _text(parts.get("traceback")) if shows_payloads else None,
    }


def _time(value: object) -> datetime | None:
    try:
        return naive_utc(datetime.fromisoformat(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
