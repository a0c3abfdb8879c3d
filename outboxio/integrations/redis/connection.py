"""A client of Redis that connects anew after a failure, and does not repeat commands by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis.asyncio as client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from outboxio.errors import ConfigurationError
from outboxio.support.log import type_name
from outboxio.support.text import briefly, without_passwords

CONNECT_TIMEOUT = 5.0  # seconds
LOST = (OSError, TimeoutError, RedisError)
"""The errors of a connection that is gone, or that Redis refuses."""

Server = str | client.Redis
"""A URL such as ``redis://:password@localhost:6379/0``, or a client that the application has made, and closes."""


class Connection:
    """Opens and closes a client, or uses the client that the application gave.

    ``options`` are keywords of ``redis.asyncio.from_url``, such as ``ssl_ca_certs``. ``timeout`` is the number of
    seconds that an answer may take.
    """

    def __init__(self, server: Server, options: Mapping[str, Any], *, name: str, timeout: float) -> None:
        if server == "":
            raise ConfigurationError(f"server is {briefly(server)}; expected a URL such as 'redis://localhost:6379/0'")
        if not isinstance(server, str) and options:
            raise ConfigurationError(f"connect={briefly(sorted(options))} beside a client: give a URL")
        self._server = server
        self._options = options
        self._name = name
        self._timeout = timeout
        self._client: client.Redis | None = None

    @property
    def client(self) -> Any:  # redis-py types the answers of few commands
        """The client; :class:`ConnectionError` if :meth:`open` was not called."""
        if self._client is None:
            raise ConnectionError(self.reason())
        return self._client

    def reason(self, error: BaseException | None = None) -> str:
        """The reason for which Redis cannot be used, in a sentence without passwords."""
        where = self._server if isinstance(self._server, str) else "the given client"
        told = "the connection is closed" if error is None else f"{type_name(error)}: {error}"
        return without_passwords(f"{self._name} has no connection to Redis ({where}): {told}")

    async def open(self) -> None:
        """Connect. Raises :class:`ConnectionError` with the reason: no server, credentials, or a certificate."""
        if isinstance(self._server, str):
            try:
                # Without retries of the client: a repeated XADD could append twice, and out of order.
                options = {
                    "retry": Retry(NoBackoff(), 0),
                    "socket_connect_timeout": CONNECT_TIMEOUT,
                    "socket_timeout": self._timeout,
                    **self._options,
                }
                self._client = client.from_url(self._server, **options)
            except ValueError as error:
                raise ConfigurationError(
                    f"server={without_passwords(self._server)!r} is no URL of Redis: {error}"
                ) from error
        else:
            self._client = self._server
        found: Any = self._client
        try:
            await found.ping()
        except (AuthenticationError, NoPermissionError, *LOST) as error:
            raise ConnectionError(self.reason(error)) from error

    async def close(self) -> None:
        """Close a client that :meth:`open` made."""
        found, self._client = self._client, None
        if found is not None and isinstance(self._server, str):
            await found.aclose()
