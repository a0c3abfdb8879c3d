"""A connection to NATS. It ends with its socket: who uses it connects again.

The client of nats-py could reconnect by itself, and would keep what is published meanwhile in memory, to send later:
too late for the order of messages. So its reconnecting is switched off.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import nats.errors
from nats.aio.client import Client

from outboxio.errors import ConfigurationError, OutboxError
from outboxio.support.log import type_name
from outboxio.support.text import briefly, without_passwords

CONNECT_TIMEOUT = 5.0  # seconds, for all servers of a list together

Servers = str | Sequence[str] | Client
"""URLs of servers, or a client that the application has connected, and closes."""


class NoStream(OutboxError):
    """No stream of JetStream takes a subject. The message is sent again after the retry policy's wait.

    ``named`` is the stream that a reply has named, although the server has no such stream for the subject.
    """

    def __init__(self, subject: str, named: str | None = None) -> None:
        self.subject = subject
        self.named = named
        if named is None:
            fix = (
                f"add a stream for it, as in `nats stream add --subjects '{subject.split('.')[0]}.>'`, or change "
                "subject= of the relay"
            )
        else:
            fix = (
                f"a reply names the stream {named!r}, which the server does not have for this subject; if the stream "
                f"is in another account or domain, or the server maps the subject, give the relay stream={named!r}"
            )
        super().__init__(f"no stream takes the subject {subject!r}: {fix}")


class NotPermitted(OutboxError):
    """The user of the connection may not publish to a subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"the user may not publish to {subject!r}: allow the subject in the server's permissions")


class Connection:
    """Opens and closes a client, or uses the client that the application gave.

    ``options`` are keywords of ``nats.connect``, such as ``tls``, ``user_credentials`` or ``token``. ``lost`` is called
    when an opened connection ends.
    """

    def __init__(self, servers: Servers, options: Mapping[str, Any], *, name: str, lost: Callable[[], None]) -> None:
        self.owned = not isinstance(servers, Client)
        if self.owned and not servers:
            raise ConfigurationError(f"servers is {briefly(servers)}; expected a URL such as 'nats://localhost:4222'")
        if not self.owned and options:
            raise ConfigurationError(
                f"connect={briefly(sorted(options))} beside a client that is connected: give a URL"
            )
        self._servers = servers
        self._options = options
        self._name = name
        self._lost = lost
        self._client = servers if isinstance(servers, Client) else None
        self._last_error: BaseException | None = None
        self._forbidden: set[str] = set()

    @property
    def is_up(self) -> bool:
        """True if the client is connected, as far as the client knows."""
        return self._client is not None and self._client.is_connected

    @property
    def client(self) -> Client:
        """The client; :class:`ConnectionError` if the connection is not open."""
        if self._client is None:
            raise ConnectionError(self.reason())
        return self._client

    def reason(self) -> str:
        """The reason for which the server cannot be reached, in a sentence without passwords."""
        where = "the given client" if not self.owned else _spelled(self._servers)
        error = self._last_error or (self._client.last_error if self._client is not None else None)
        told = "the connection is closed" if error is None else f"{type_name(error)}: {error}"
        return f"{self._name} has no connection to NATS ({where}): {without_passwords(told)}"

    def forbids(self, subject: str) -> bool:
        """True if the server has refused a message to this subject. The client tells subjects in small letters."""
        return subject.lower() in self._forbidden

    async def open(self) -> None:
        """Connect. Raises :class:`ConnectionError` with the reason: no server, credentials, or a certificate."""
        if not self.owned:
            if not self.is_up:
                raise ConnectionError(self.reason())
            return
        self._last_error = None
        self._forbidden.clear()
        client = Client()

        async def closed() -> None:
            if self._client is client:
                self._lost()

        options: dict[str, Any] = {
            "name": f"outboxio {self._name}",
            **self._options,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            "error_cb": self._failed,
            "closed_cb": closed,
        }
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await client.connect(cast("str | list[str]", self._servers), **options)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            if self._last_error is None or not isinstance(error, nats.errors.NoServersError | TimeoutError):
                self._last_error = error
            told = self.reason()
            with contextlib.suppress(Exception):  # of a connection that failed; the reason is told already
                async with asyncio.timeout(1):
                    await client.close()  # a socket may be open, as when the server refuses the credentials
            raise ConnectionError(told) from error
        self._client = client

    async def close(self) -> None:
        """Send what is under way, and close a client that :meth:`open` connected."""
        client = self._client
        if client is None or not self.owned:
            return
        self._client = None
        if client.is_connected:
            try:
                await client.flush(2)
            except (OSError, nats.errors.Error):  # the connection ends anyway
                self._last_error = client.last_error
        await client.close()

    async def _failed(self, error: Exception) -> None:
        refused = _FORBIDDEN.search(str(error))
        if refused is None:
            self._last_error = error
        else:  # the connection stays open
            self._forbidden.add(refused[1].lower())


_FORBIDDEN = re.compile(r'Permissions Violation for Publish to "([^"]+)"', re.IGNORECASE)


def _spelled(servers: Servers) -> str:
    urls = servers if isinstance(servers, str) else ", ".join(map(str, cast("Sequence[str]", servers)))
    return without_passwords(urls)
