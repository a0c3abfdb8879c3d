"""NATS JetStream: a relay that publishes events to a stream, and an inbox that receives from a stream.

Needs ``outboxio[nats]``, that is nats-py, and a server with JetStream.
"""

from importlib import import_module

from outboxio.errors import ConfigurationError

try:
    import_module("nats")
except ImportError as error:
    raise ConfigurationError("outboxio.integrations.nats needs nats-py: pip install 'outboxio[nats]'") from error

from outboxio.integrations.nats.connection import NoStream, NotPermitted
from outboxio.integrations.nats.inbox import NatsInbox
from outboxio.integrations.nats.relay import NatsRelay

__all__ = ["NatsInbox", "NatsRelay", "NoStream", "NotPermitted"]
