"""Addresses and options of connections to Kafka, and the reason for which a connection fails."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from outboxio.errors import ConfigurationError
from outboxio.integrations.kafka.client import ConnectionFailed, create_conn
from outboxio.integrations.kafka.refusals import told
from outboxio.support.text import briefly, instead_of

CONNECT_TIMEOUT = 5.0  # seconds

Servers = str | Sequence[str]
"""``"host:port"``, several with commas between or as a list."""

_OF_CONNECTIONS = (
    "client_id",
    "security_protocol",
    "ssl_context",
    "sasl_mechanism",
    "sasl_plain_username",
    "sasl_plain_password",
    "sasl_kerberos_service_name",
    "sasl_kerberos_domain_name",
    "sasl_oauth_token_provider",
)


class Access:
    """The addresses of servers, and keywords for a client class of aiokafka. ``own``: keywords that are not for users.

    Raises :class:`ConfigurationError` for a missing address, an unknown keyword, and a keyword of ``own``.
    """

    def __init__(
        self, servers: Servers, options: Mapping[str, Any], client: type[Any], *, own: Mapping[str, str]
    ) -> None:
        self.servers = [servers] if isinstance(servers, str) else list(servers)
        self.servers = [each.strip() for given in self.servers for each in given.split(",") if each.strip()]
        if not self.servers or any("//" in each for each in self.servers):
            raise ConfigurationError(f"servers is {briefly(servers)}; expected addresses such as 'localhost:9092'")
        known = inspect.signature(client).parameters
        for name in options:
            if name in own:
                raise ConfigurationError(f"connect has {name!r}: {own[name]}")
            if name not in known:
                raise ConfigurationError(f"connect has {name!r}, which is no keyword: {instead_of(name, known)}")
        self.options = dict(options)

    @property
    def place(self) -> str:
        return ", ".join(self.servers)

    async def reason(self, error: BaseException) -> str:
        """Why a client of these options could not start, in a sentence.

        The client tells in its log only why an address failed, so the first address is tried once more.
        """
        if isinstance(error, ConnectionFailed):
            found = await self._first_failure()
            reason = f"no connection to Kafka ({self.place}): {told(found or error)}{self._hint(found)}"
        elif isinstance(error, TimeoutError):
            reason = f"Kafka ({self.place}) has not answered within {CONNECT_TIMEOUT:g} s"
        else:
            reason = f"Kafka ({self.place}) refuses the connection: {told(error)}{self._hint(error)}"
        return reason

    def _hint(self, error: BaseException | None) -> str:
        """What to look at, where the client's error does not say it."""
        if error is None:
            return (
                "; a connection opens, and no request is answered: does the server want TLS or credentials in connect=?"
            )
        if str(self.options.get("security_protocol", "")).startswith("SASL") and not isinstance(error, OSError):
            # Some servers only close the connection, and for some answers the client fails with a KeyError.
            return f"; are user and password for {self.options.get('sasl_mechanism', 'PLAIN')} right?"
        return ""

    async def _first_failure(self) -> BaseException | None:
        host, _, port = self.servers[0].rpartition(":")
        options = {name: self.options[name] for name in _OF_CONNECTIONS if name in self.options}
        try:
            connection = await create_conn(
                (host or port).strip("[]"), int(port) if host else 9092, request_timeout_ms=3000, **options
            )
        except Exception as error:  # aiokafka fails with a KeyError for some refusals of credentials
            return error
        connection.close()
        return None
