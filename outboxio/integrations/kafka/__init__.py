"""Kafka: a relay that sends events to topics, and an inbox that receives from topics as a member of a consumer group.

Needs ``outboxio[kafka]``, that is aiokafka, and Kafka 2.1 or later, or a broker that speaks its protocol.
"""

from outboxio.errors import ConfigurationError

try:
    import aiokafka as _client  # noqa: F401  # found out once, here
except ImportError as error:
    raise ConfigurationError("outboxio.integrations.kafka needs aiokafka: pip install 'outboxio[kafka]'") from error

from outboxio.integrations.kafka.inbox import KafkaInbox
from outboxio.integrations.kafka.refusals import NoTopic, NotPermitted, Refused
from outboxio.integrations.kafka.relay import KafkaRelay
from outboxio.integrations.kafka.topics import by_event_type, by_model_type

__all__ = ["KafkaInbox", "KafkaRelay", "NoTopic", "NotPermitted", "Refused", "by_event_type", "by_model_type"]
