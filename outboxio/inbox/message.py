"""Inbox messages as passed by the caller, which are validated before any row is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal, TypedDict, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.actions.executor import ActionExecutor, WritableShard
from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.inbox.inline import Message, Received
from outboxio.model.emitter import Emitter, column_text
from outboxio.model.event import RECEIVED_ACTION, EventRecord, checked_name
from outboxio.model.payloads.classes import AnyEvent, checked_version, header_of, named_by
from outboxio.storage.protocols import ConsumeResult
from outboxio.support.codec import decode_document, encode_object
from outboxio.support.ids import uuid7
from outboxio.support.text import briefly
from outboxio.transaction import Transaction, write_received


class MessageParts(TypedDict, total=False):
    """The parts of a message, as keywords of ``consume``."""

    source: str
    external_id: str
    event: AnyEvent | None
    type: str | None
    payload: object
    version: int
    model: object
    model_id: object
    model_type: str | None
    topic: str | None
    ordering_key: object
    headers: Mapping[str, Any] | None
    correlation_id: str | None
    available_at: datetime | None


class MessageInput(Struct, frozen=True, kw_only=True):
    """The parts of a message as passed by the caller."""

    source: str = ""
    external_id: str = ""
    event: AnyEvent | None = None
    type: str | None = None
    payload: object = None
    version: int = 1
    model: object = None
    model_id: object = None
    model_type: str | None = None
    topic: str | None = None
    ordering_key: object = None
    headers: Mapping[str, Any] | None = None
    correlation_id: str | None = None
    available_at: datetime | None = None

    @property
    def params(self) -> dict[str, str]:
        """The parameters of the action that receives the message."""
        return {"source": self.source, "external_id": self.external_id}

    def checked(self, emitter: Emitter) -> EventRecord:
        """Return the record of the event. Raises :class:`InvalidEvent` if a part cannot be stored."""
        checked_name(self.source, "source")
        external_id = checked_name(self.external_id, f"external_id of {self.source!r}")
        subject = f"message {external_id!r} from {self.source!r}"
        record = self._record(emitter, subject)
        routing = emitter.routing(
            subject, ordering_key=self.ordering_key, topic=self.topic, available_at=self.available_at
        )
        return replace(record, **routing)

    def _record(self, emitter: Emitter, subject: str) -> EventRecord:
        event, payload, id, kind = self.event, self.payload, self.model_id, self.model_type
        if self.model is not None:
            id, kind = named_by(self.model, id, kind)
        if (event is None) == (self.type is None) or (event is not None and payload is not None):
            raise InvalidEvent(subject, "pass either event=, or type= and payload=")
        version = checked_version(self.version, f"version of {subject}")
        if event is not None:
            if version != 1:
                raise InvalidEvent(
                    subject, "pass version= with type= and payload=; the class of event= already has a version"
                )
            return emitter.record(event, model_id=id, model_type=kind)
        return EventRecord(
            id=emitter.new_id(),
            event_type=checked_name(self.type, f"type of {subject}"),
            payload=encode_object(
                _decoded(payload, subject),
                f"payload of {subject}",
                stores_nul=emitter.stores_nul,
                check=emitter.check_numbers,
            ),
            headers=header_of(version),
            model_id=column_text(id, subject, "model_id"),
            model_type=column_text(kind, subject, "model_type"),
        )


def parts_of(message: object) -> dict[str, Any]:
    """Return the parts of a message that is a mapping or an object."""
    if message is None:
        return {}
    if isinstance(message, Mapping):
        mapping = dict(cast(Mapping[str, Any], message))
        for key in mapping.keys() - MessageParts.__annotations__.keys():
            parts = ", ".join(MessageParts.__annotations__)
            raise InvalidEvent("the message", f"unknown part {briefly(key)}; expected {parts}")
        return mapping
    return {part: getattr(message, part) for part in MessageParts.__annotations__ if hasattr(message, part)}


def hash_of(event: EventRecord) -> str:
    """Return the hash of type and content, which does not depend on key order or white space."""
    content = msgspec.json.decode(event.payload or "null")
    return sha256(msgspec.json.encode([event.event_type, content], order="deterministic")).hexdigest()


def _decoded(payload: object, subject: str) -> object:
    """Decode a payload that is JSON text or bytes, in order to find values that cannot be stored."""
    if not isinstance(payload, str | bytes | bytearray):
        return payload
    return decode_document(payload, f"payload of {subject}")


# --- many messages, stored with one INSERT of inbox rows and one INSERT of events -----------------


MAX_MESSAGES = 10_000

OnInvalid = Literal["raise", "return"]


def checked(executor: ActionExecutor, target: WritableShard, parts: MessageInput) -> Message:
    """Validate and encode a message. Return it with the action that receives it."""
    event = parts.checked(target.emitter)
    action = executor.action_record(
        target, RECEIVED_ACTION, parts.params, parts.headers, uuid7(), parts.correlation_id, None, parts.source
    )
    return Message(parts.source, parts.external_id, hash_of(event), action, event)


class Messages:
    """Validated messages to store together."""

    def __init__(self, consumer: str, number: int, messages: Mapping[int, Message | InvalidEvent]) -> None:
        self._consumer = consumer
        self._number = number
        self._invalid = {index: one for index, one in messages.items() if isinstance(one, InvalidEvent)}
        self.valid = {index: one for index, one in messages.items() if not isinstance(one, InvalidEvent)}
        """The messages that can be stored, by index."""
        self._found: dict[tuple[str, str], ConsumeResult] = {}

    async def store_in(self, tx: Transaction, now: datetime, *, commits: bool = False) -> bool:
        """Write the new messages in the transaction ``tx``. Return True if there are any.

        ``commits``: outboxio commits the transaction.
        """
        rows = [one.row(self._consumer, now) for one in self.valid.values()]
        rows.sort(key=lambda row: (row.source, row.external_id))
        found = await tx.consume_all(rows)
        self._found = {(row.source, row.external_id): row for row in found}
        new = [(one.action.completed(now), one.event) for one in self.valid.values() if self._is_new(one)]
        if new:
            await write_received(tx, new, commits=commits)
        return bool(new)

    def _is_new(self, one: Message) -> bool:
        return self._found[one.source, one.external_id].event_id == one.event.id

    def results(self, conflicts: Callable[[str, str], None]) -> list[Received | InvalidEvent]:
        """Return the result of each message, and call ``conflicts`` with the source and id of each conflict."""
        return [self._result(index, conflicts) for index in range(self._number)]

    def _result(self, index: int, conflicts: Callable[[str, str], None]) -> Received | InvalidEvent:
        if (invalid := self._invalid.get(index)) is not None:
            return invalid
        one = self.valid[index]
        if self._is_new(one):
            return Received.RECEIVED
        if self._found[one.source, one.external_id].payload_hash == one.payload_hash:
            return Received.DUPLICATE
        conflicts(one.source, one.external_id)
        return Received.CONFLICT


def checked_all(
    executor: ActionExecutor, target: WritableShard, messages: Iterable[object], on_invalid: OnInvalid, consumer: str
) -> Messages:
    """Validate and encode messages.

    Raises :class:`InvalidEvent` with the index of the first message that cannot be stored, unless ``on_invalid`` is
    "return".
    """
    if on_invalid not in ("raise", "return"):
        raise ConfigurationError(f"on_invalid is {briefly(on_invalid)}; expected 'raise' or 'return'")
    if isinstance(messages, Mapping | str | bytes):  # a single message, by mistake
        raise ConfigurationError(f"messages is {briefly(cast(Any, messages))}; expected a list of messages")
    listed = list(messages)
    if len(listed) > MAX_MESSAGES:
        raise ConfigurationError(
            f"receive_many() got {len(listed)} messages; one call takes at most {MAX_MESSAGES}: make several calls"
        )
    found: dict[int, Message | InvalidEvent] = {}
    for index, message in enumerate(listed):
        try:
            if message is None:
                raise InvalidEvent(
                    "the message", "it is None; pass a mapping with the parts of receive(), or an object"
                )
            found[index] = checked(executor, target, MessageInput(**parts_of(message)))
        except InvalidEvent as error:
            if on_invalid == "raise":
                subject = f"messages[{index}]: {error.subject}"
                logged = error.without_value.removeprefix(f"{error.subject}: ")
                raise InvalidEvent(subject, error.reason, logged=logged) from error
            found[index] = error
    return Messages(consumer, len(listed), found)
