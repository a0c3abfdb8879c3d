"""Kafka: a relay that sends events to topics, and an inbox that receives from topics as a member of a consumer group.

Needs ``outboxio[kafka]``, that is aiokafka, and Kafka 2.1 or later, or a broker that speaks its protocol.
"""

from importlib.util import find_spec

from outboxio.errors import ConfigurationError

if find_spec("aiokafka") is None:
    raise ConfigurationError("outboxio.integrations.kafka needs aiokafka: pip install 'outboxio[kafka]'")

from outboxio.integrations.kafka.inbox import KafkaInbox
from outboxio.integrations.kafka.refusals import NoTopic, NotPermitted, Refused
from outboxio.integrations.kafka.relay import KafkaRelay
from outboxio.integrations.kafka.topics import by_event_type, by_model_type

__all__ = ["KafkaInbox", "KafkaRelay", "NoTopic", "NotPermitted", "Refused", "by_event_type", "by_model_type"]
