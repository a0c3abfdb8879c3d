"""The connection of a relay or an inbox to its broker.

A connection ends with its socket, and the relay or inbox connects again. The clients could reconnect in the background,
which is switched off: messages would wait in memory and leave later, out of order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from outboxio.errors import ConfigurationError
from outboxio.support.log import type_name
from outboxio.support.text import briefly, without_passwords

CONNECT_TIMEOUT = 5.0  # seconds, for all addresses together


class Connection:
    """An address, and the client that is connected to it; or the client that the application gave, and closes.

    ``options`` are the keywords with which the client is made, and ``name`` names the relay or inbox in errors.
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
            raise ConfigurationError(f"connect={briefly(sorted(options))} beside a {self.client_name}: give a URL")
        self.server = server
        self.options = options or {}
        self.name = name

    def reason(self, error: BaseException | None = None) -> str:
        """Why the broker cannot be used, in a sentence without passwords."""
        servers = [self.server] if isinstance(self.server, str) else self.server
        where = f"the given {self.client_name}" if self.is_given else ", ".join(map(str, servers))
        problem = "the connection is closed" if error is None else f"{type_name(error)}: {error}"
        return without_passwords(f"{self.name} has no connection to {self.broker} ({where}): {problem}")
