"""The connection of a relay or an inbox to its broker.

The relay or inbox reconnects when its socket closes. Background reconnection of the clients is switched off, because
messages would wait in memory and be sent later, out of order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from outboxio.errors import ConfigurationError
from outboxio.support.log import type_name
from outboxio.support.text import briefly, without_passwords

CONNECT_TIMEOUT = 5.0  # seconds, for all addresses together


class BrokerConnection:
    """A client for an address, or a client that your application passes in and closes itself.

    ``options`` are the keyword arguments of the client; ``name`` identifies the relay or inbox in errors.
    """

    broker: ClassVar[str]
    url: ClassVar[str]
    """An example."""
    argument: ClassVar[str] = "server"
    client_name: ClassVar[str] = "client"

    def __init__(self, server: Any, options: Mapping[str, Any] | None, *, name: str) -> None:
        self.is_given = not isinstance(server, str | Sequence)
        if not server:
            raise ConfigurationError(f"{self.argument} is {briefly(server)}; expected a URL such as {self.url!r}")
        if self.is_given and options:
            raise ConfigurationError(
                f"connect={briefly(sorted(options))} cannot be combined with a {self.client_name}: pass a URL"
            )
        self.server = server
        self.options = options or {}
        self.name = name

    def reason(self, error: BaseException | None = None) -> str:
        """Return why the broker cannot be used, in a sentence without passwords."""
        servers = [self.server] if isinstance(self.server, str) else self.server
        where = f"your {self.client_name}" if self.is_given else ", ".join(map(str, servers))
        problem = "the connection is closed" if error is None else f"{type_name(error)}: {error}"
        return without_passwords(f"{self.name} has no connection to {self.broker} ({where}): {problem}")
