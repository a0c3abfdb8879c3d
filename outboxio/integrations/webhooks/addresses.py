"""The URLs and addresses that a webhook may reach. URLs come from customers, so they are untrusted.

A URL is first checked offline. Its host name is resolved once per connection, every address is checked, and the
connection is made to one of these addresses, which prevents DNS rebinding.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpcore

from outboxio.errors import ConfigurationError, Unprocessable

LONGEST_URL = 2048
MOST_TRIED = 3  # addresses of a host name
MOST_RESOLVING = 256  # threads that resolve names at the same time: customers' name servers may be slow
MOST_RECEIVED = 128 * 1024  # bytes of a response, including headers and framing

Address = IPv4Address | IPv6Address

_FORBIDDEN = [ip_network(one) for one in (
    "100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "224.0.0.0/3",
    "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
)]  # fmt: skip
"""Networks that some version of Python counts as global: shared addresses, Azure's metadata service, 6to4 relays,
multicast, reserved networks, Teredo and 6to4, which embed IPv4 addresses."""
_UNICAST = ip_network("2000::/3")  # without IPv4-mapped and -compatible addresses, and without NAT64

_is_name = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]").fullmatch
_is_word = re.compile(r"[A-Za-z][A-Za-z0-9-]*").fullmatch
_is_plain = re.compile(r"[!#-;=?-\[\]_a-z~]+").fullmatch  # ASCII without blanks, backslashes and controls


class UrlRefused(Unprocessable):
    """The URL of an endpoint is not allowed."""


class AllowList:
    """Hosts and networks that may be reached although they are not public, even by ``http``.

    Raises :class:`~outboxio.ConfigurationError` for an entry that is neither a network nor a host name.
    """

    def __init__(self, allow: Iterable[str]) -> None:
        if isinstance(allow, str):
            raise ConfigurationError(f"allow={allow!r} is a string; pass a list: [{allow!r}]")
        entries = [str(entry).lower() for entry in allow]
        names = {entry for entry in entries if _is_name(entry) or _is_word(entry)}
        try:
            self._networks = [ip_network(entry) for entry in entries if entry not in names]
        except ValueError as error:
            raise ConfigurationError(f"allow: {error}; expected networks such as '10.0.0.0/8', or host names") from None
        self._names = names

    def admits(self, host: str, address: Address | None) -> bool:
        """True for an allowed name, or an address in an allowed network."""
        return host in self._names or (address is not None and any(address in network for network in self._networks))


def is_public(address: Address) -> bool:
    """True for a unicast address of the public Internet."""
    if address.version == 6 and address not in _UNICAST:
        return False
    return address.is_global and not any(address in network for network in _FORBIDDEN)


def checked_url(url: str, allowed: AllowList) -> httpcore.URL:
    """Return the URL to request. Raises :class:`UrlRefused` for a URL that is not allowed."""
    if len(url) > LONGEST_URL:
        raise _refused(f"it has {len(url)} characters; at most {LONGEST_URL} are allowed")
    if not _is_plain(url):
        raise _refused("it contains a character that must be escaped; host names are written in ASCII (xn--...)")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _refused("it cannot be parsed") from None
    address = _address(host)
    is_allowed = allowed.admits(host, address)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_allowed):
        raise _refused(f"its scheme is {parts.scheme[:20]!r}; expected 'https'")
    if "@" in parts.netloc:
        raise _refused("it has a user name or a password")
    if not is_allowed:
        if address is None and (len(host) > 253 or not _is_name(host)):
            raise _refused(f"{host[:80]!r} is not a full domain name")
        if address is not None and not is_public(address):
            raise _refused(f"{host} is not a public address")
        if port is not None and port != 443 and port < 1024:
            raise _refused(f"port {port} is not allowed; use 443 or a port above 1023")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return httpcore.URL(scheme=parts.scheme, host=host, port=port, target=target)


def _refused(reason: str) -> UrlRefused:
    return UrlRefused(f"the URL of the endpoint is not allowed: {reason}")


def _address(host: str) -> Address | None:
    try:
        return None if "%" in host else ip_address(host)
    except ValueError:
        return None


async def resolve(host: str, port: int, limiter: anyio.CapacityLimiter) -> list[str]:
    """Return the addresses of a host name. Raises :class:`OSError` for a name without addresses.

    Uses separate threads: a slow name server must not block your application's threads.
    """
    read = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await anyio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=limiter)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects only to checked addresses. TLS still verifies the certificate against the host name."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._backend = cast(httpcore.AsyncNetworkBackend, httpcore.AnyIOBackend())
        self._limiter = anyio.CapacityLimiter(MOST_RESOLVING)

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:  # fmt: skip
        with anyio.fail_after(timeout):
            addresses = [host] if _address(host) else await resolve(host, port, self._limiter)
            for address in addresses:
                if not (is_public(ip_address(address)) or self._allowed.admits(host, ip_address(address))):
                    # Without the address: customers may read the error, and must not explore internal names.
                    raise httpcore.ConnectError(f"{host} resolves to an address that is not public")
            failure: Exception | None = None
            tried = addresses[:MOST_TRIED]
            share = timeout and timeout / max(len(tried), 1)  # an address that drops packets leaves time for the next
            for address in tried:
                try:
                    stream = await self._backend.connect_tcp(address, port, share, local_address, socket_options)
                    return _Limited(stream)
                except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                    failure = error
            raise failure or httpcore.ConnectError(f"{host} has no address")


class _Limited(httpcore.AsyncNetworkStream):
    """A connection that accepts a limited number of bytes after each write.

    Nothing else limits data outside of the body, such as endless 100 responses, which would block the event loop.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._left = MOST_RECEIVED

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        received = await self._stream.read(min(max_bytes, self._left + 1), timeout)
        self._left -= len(received)
        if self._left < 0:
            raise httpcore.ReadError(f"the response is larger than {MOST_RECEIVED // 1024} KiB")
        return received

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._left = MOST_RECEIVED
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Limited(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
