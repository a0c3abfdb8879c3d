"""What the errors of the client mean for a message: never, not now, or not yet."""

from __future__ import annotations

import aiokafka.errors as kafka

from outboxio.errors import OutboxError

TOO_LARGE = (kafka.MessageSizeTooLargeError, kafka.RecordListTooLargeError)
GONE = (
    kafka.KafkaConnectionError,
    kafka.KafkaTimeoutError,
    kafka.NodeNotReadyError,
    kafka.OutOfOrderSequenceNumber,
    kafka.ProducerClosed,
    kafka.ProducerFenced,
    kafka.RequestTimedOutError,
    kafka.UnknownProducerId,
)
"""Errors of the connection and of the producer, not of a message: the relay opens a new producer."""


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
    if isinstance(error, kafka.TopicAuthorizationFailedError):
        return NotPermitted(topic)
    if isinstance(error, kafka.UnknownTopicOrPartitionError):
        return NoTopic(topic)
    return Refused(f"Kafka refused a message to {topic!r}: {told(error)}")


def told(error: BaseException) -> str:
    """An error of the client in words, with its name."""
    text = str(error)
    name = type(error).__name__
    return text if name in text else f"{name}: {text}" if text else name
