"""Names of topics: templates, functions, and the names that Kafka takes."""

from __future__ import annotations

import re
from collections.abc import Callable

from outboxio.errors import ConfigurationError, Unprocessable
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.template import Template
from outboxio.support.text import briefly

Topics = str | Callable[[Message], str]
"""The topic of each message: a template, or a function of the message."""

_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})
_VALID = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")


def by_model_type(pattern: str) -> Callable[[Message], str]:
    """The topic by the model type, which takes the place of ``{}``.

    Example::

        KafkaRelay("localhost:9092", name="to-kafka", topics=by_model_type("outbox.{}"))
    """
    return _by("model_type", pattern)


def by_event_type(pattern: str) -> Callable[[Message], str]:
    """The topic by the event type, which takes the place of ``{}``.

    Example::

        KafkaRelay("localhost:9092", name="to-kafka", topics=by_event_type("wallets.{}"))
    """
    return _by("event_type", pattern)


def topics_of(topics: Topics) -> Callable[[Message], str]:
    """The function that ``topics`` means; :class:`ConfigurationError` for a template that makes no sense."""
    return topics if callable(topics) else Template(topics, option="topics")


def valid(topic: str, message: Message) -> str:
    """The topic, or :class:`Unprocessable` for a name that Kafka does not take."""
    if not isinstance(topic, str) or not _VALID.match(topic) or topic in (".", ".."):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise Unprocessable(
            f"event {message.id} of type {message.type!r} has the topic {briefly(topic)}; Kafka takes 1 to 249 "
            "letters, digits, dots, hyphens and underscores: change topics= of the relay, or the model type"
        )
    if topic in _INTERNAL:
        raise Unprocessable(
            f"event {message.id} of type {message.type!r} has the topic {topic!r}, which belongs to Kafka itself: "
            "change topics= of the relay"
        )
    return topic


def _by(field: str, pattern: str) -> Callable[[Message], str]:
    if not isinstance(pattern, str) or pattern.count("{}") != 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise ConfigurationError(f"the pattern is {briefly(pattern)}; expected a text with one {{}}, as 'outbox.{{}}'")
    return Template(pattern.replace("{}", f"{{{field}}}"), option="topics")
