"""What relays and inboxes of all brokers share: messages, their layouts on the wire, and the rules of sending.

A module of a broker, such as ``outboxio.integrations.nats``, has a relay and an inbox, which call its client. For NATS
and Kafka, ``nats_client`` and ``kafka_client`` here are what is between the two; nothing else here knows a client.
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
