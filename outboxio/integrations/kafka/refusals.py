"""What the errors of the client mean for a message: never, not now, or not yet."""

from __future__ import annotations

from outboxio.errors import OutboxError
from outboxio.integrations.kafka.client import TopicForbidden, UnknownTopic


class NoTopic(OutboxError):
    """The topic is missing, and the broker does not make topics. The message is sent again after the policy's wait."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(
            f"Kafka has no topic {topic!r}: add the topic, as in `kafka-topics.sh --create --topic {topic}`, or change "
            "topics= of the relay"
        )


class NotPermitted(OutboxError):
    """The user of the connection may not write to a topic."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(f"the user may not write to the topic {topic!r}: allow WRITE and DESCRIBE to the user")


class Refused(OutboxError):
    """Kafka answered with an error, such as a record that the topic's settings forbid."""


def refusal(error: BaseException, topic: str) -> Exception:
    """The error for a message that Kafka refused, which uses up an attempt."""
    if isinstance(error, TopicForbidden):
        return NotPermitted(topic)
    if isinstance(error, UnknownTopic):
        return NoTopic(topic)
    return Refused(f"Kafka refused a message to {topic!r}: {told(error)}")


def told(error: BaseException) -> str:
    """An error of the client in words, with its name."""
    text = str(error)
    name = type(error).__name__
    return text if name in text else f"{name}: {text}" if text else name
