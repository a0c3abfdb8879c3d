"""The part of an outbox that exports its event types."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outboxio.handlers.handler import HandlerRegistry
    from outboxio.model.event import EventTypes


class Publishing(ABC):
    """The base class of :class:`~outboxio.Outbox` that exports the event types."""

    namespace: str
    _handlers: HandlerRegistry
    _types: EventTypes

    def catalogue(
        self,
        *,
        version: str = "1.0.0",
        emitted_by: Mapping[str, Iterable[str]] | None = None,
        lock_file: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Return the event types of this outbox as an AsyncAPI 3.0 document that ``json.dumps`` can write.

        Each event type is a channel whose message has the JSON Schema of the payload, and examples. Each handler is a
        ``receive`` operation. A relay is a ``send`` operation on a channel with the relay's address. The document
        covers the types of the handlers and those passed to :meth:`register`. No database is read.

        ``version`` is the version of the document. ``emitted_by`` maps event types to actions, as returned by
        ``await outbox.admin.emitters()``. ``lock_file``, written by ``outboxio events --write``, adds the
        messages of older versions.

        Raises :class:`ConfigurationError` for a lock file that cannot be read, and :class:`InvalidEvent` for an example
        that cannot be stored.

        Example::

            document = outbox.catalogue(emitted_by=await outbox.admin.emitters())
            Path("asyncapi.json").write_text(json.dumps(document, indent=2))
        """
        from outboxio.catalogue.asyncapi import document_of
        from outboxio.catalogue.event_types import event_types, is_internal, published
        from outboxio.catalogue.lock import Lock, read_lock

        lock = Lock({}) if lock_file is None else read_lock(Path(lock_file))
        types = published(event_types(self._handlers, self._types, self.namespace, emitted_by or {}))
        topics: dict[str, list[str]] = {}
        for handler in self._handlers:
            if handler.topic is not None and not is_internal(handler.topic):
                topics.setdefault(handler.topic, []).append(handler.name)
        older = {name: one.versions for name, one in lock.events.items()}
        return document_of(types, namespace=self.namespace, version=version, topics=topics, older=older)
