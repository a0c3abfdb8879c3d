"""What the relays and inboxes of all brokers share: messages, wire formats, and the rules for sending.

Each broker has a module with a relay and an inbox, such as ``outboxio.integrations.nats``, which calls the broker's
client library. For NATS and Kafka, ``nats_client`` and ``kafka_client`` wrap the library; no other module in this
package depends on a client library.
"""

from outboxio.integrations.brokers.inbox import BrokerInbox, Incoming, incoming_of
from outboxio.integrations.brokers.message import FORMATS, Message, Template, Wire, message_of, wire_format
from outboxio.integrations.brokers.relay import Parcel, Relay

__all__ = [
    "FORMATS",
    "BrokerInbox",
    "Incoming",
    "Message",
    "Parcel",
    "Relay",
    "Template",
    "Wire",
    "incoming_of",
    "message_of",
    "wire_format",
]
