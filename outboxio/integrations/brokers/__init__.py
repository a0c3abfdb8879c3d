"""What relays and inboxes of all brokers share: messages, their layouts on the wire, and the rules of sending.

The modules of the brokers (``outboxio.integrations.nats`` and its like) know a client; everything else is here, and
nothing here knows a client.
"""

from outboxio.integrations.brokers.formats import FORMATS, Wire, wire_format
from outboxio.integrations.brokers.inbox import BrokerInbox
from outboxio.integrations.brokers.incoming import Incoming, incoming_of
from outboxio.integrations.brokers.message import Message, message_of
from outboxio.integrations.brokers.relay import Parcel, Relay
from outboxio.integrations.brokers.template import Template

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
