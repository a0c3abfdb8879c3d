"""RabbitMQ: a relay that publishes events to an exchange, and an inbox that receives from a queue.

Needs ``outboxio[rabbitmq]``, that is aio-pika.
"""

from importlib import import_module

from outboxio.errors import ConfigurationError

try:
    import_module("aio_pika")  # found out once, here
except ImportError as error:
    raise ConfigurationError(
        "outboxio.integrations.rabbitmq needs aio-pika: pip install 'outboxio[rabbitmq]'"
    ) from error

from outboxio.integrations.rabbitmq.inbox import RabbitInbox
from outboxio.integrations.rabbitmq.relay import PublishRefused, RabbitRelay, Unroutable

__all__ = ["PublishRefused", "RabbitInbox", "RabbitRelay", "Unroutable"]
