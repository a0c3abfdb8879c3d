"""A connection to RabbitMQ with one channel. It ends with its socket: who uses it connects again.

The robust connection of aio-pika would reconnect by itself, and lets a publisher wait for ever meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aio_pika
import aiormq.exceptions
from aio_pika.abc import AbstractConnection
from aiormq.channel import Channel

from outboxio.errors import ConfigurationError
from outboxio.support.log import type_name
from outboxio.support.text import briefly, without_passwords

CONNECT_TIMEOUT = 5.0  # seconds
LOST = (OSError, TimeoutError, aiormq.exceptions.AMQPError)
"""The errors of a connection or a channel that is gone."""

Server = str | AbstractConnection
"""A URL such as ``amqp://user:password@localhost/``, or a connection that the application has opened, and closes."""


class Connection:
    """Opens and closes a connection, or uses the connection that the application gave; the channel is its own.

    ``options`` are keywords of ``aio_pika.connect``, such as ``ssl_context``.
    """

    def __init__(self, server: Server, options: Mapping[str, Any], *, name: str) -> None:
        if not server:
            raise ConfigurationError(f"server is {briefly(server)}; expected a URL such as 'amqp://localhost/'")
        if not isinstance(server, str) and options:
            raise ConfigurationError(f"connect={briefly(sorted(options))} beside a connection that is open: give a URL")
        self._server = server
        self._options = options
        self._name = name
        self._connection: AbstractConnection | None = None
        self._channel: Any = None

    @property
    def is_up(self) -> bool:
        """True if the channel is open, as far as the client knows."""
        return self._channel is not None and not self._channel.is_closed and not self._is_cut

    @property
    def _is_cut(self) -> bool:
        return self._connection is None or self._connection.is_closed

    def reason(self, error: BaseException | None = None) -> str:
        """The reason for which the broker cannot be used, in a sentence without passwords."""
        where = self._server if isinstance(self._server, str) else "the given connection"
        told = "the connection is closed" if error is None else f"{type_name(error)}: {error}"
        return without_passwords(f"{self._name} has no connection to RabbitMQ ({where}): {told}")

    async def channel(self, *, confirms: bool) -> Channel:
        """A new channel. Raises :class:`ConnectionError` with the reason: no broker, credentials, or a certificate."""
        try:
            if isinstance(self._server, str):
                if self._is_cut:
                    options: dict[str, Any] = {"timeout": CONNECT_TIMEOUT, **self._options}
                    self._connection = await aio_pika.connect(self._server, **options)
            else:
                self._connection = self._server
            connection: Any = self._connection  # the client types neither the channel nor its underlay
            channel: Any = connection.channel(publisher_confirms=confirms)
            self._channel = channel
            await channel.initialize(timeout=CONNECT_TIMEOUT)
            underlay: Channel = await channel.get_underlay_channel()
        except (*LOST, RuntimeError) as error:
            raise ConnectionError(self.reason(error)) from error
        return underlay

    async def close(self) -> None:
        """Close the channel, and a connection that was opened here."""
        connection, self._connection = self._connection, None
        channel, self._channel = self._channel, None
        if channel is not None and not channel.is_closed and connection is not None and not connection.is_closed:
            await channel.close()
        if connection is not None and isinstance(self._server, str):
            await connection.close()
