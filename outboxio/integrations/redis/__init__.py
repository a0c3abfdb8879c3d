"""Redis Streams: a relay that appends events to a stream, and an inbox that receives from a stream.

Needs ``outboxio[redis]``, that is redis-py, and Redis 6.2 or newer.
"""

from importlib import import_module

from outboxio.errors import ConfigurationError

try:
    import_module("redis.asyncio")  # found out once, here
except ImportError as error:
    raise ConfigurationError("outboxio.integrations.redis needs redis-py: pip install 'outboxio[redis]'") from error

from outboxio.integrations.redis.inbox import RedisInbox
from outboxio.integrations.redis.relay import AppendRefused, RedisRelay

__all__ = ["AppendRefused", "RedisInbox", "RedisRelay"]
