"""The URLs and addresses that a webhook may reach. URLs come from customers, so all of this treats them as hostile.

A URL is checked without the network first. The host name is resolved once for each connection, every address is
checked, and the connection goes to one of exactly these addresses: a name that resolves differently a moment later
changes nothing.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpcore

from outboxio.errors import ConfigurationError, Unprocessable
from outboxio.support.text import briefly

LONGEST_URL = 2048
MOST_TRIED = 3  # addresses of a host name
MOST_RESOLVING = 32  # host names that are resolved at the same time

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_FORBIDDEN = tuple(
    ip_network(network)
    for network in (
        "100.64.0.0/10",  # carrier-grade NAT
        "168.63.129.16/32",  # the metadata service of Azure
        "192.0.0.0/24",
        "192.88.99.0/24",  # relays of 6to4
        "198.18.0.0/15",
        "224.0.0.0/3",  # multicast and reserved
        "2001::/23",  # Teredo and other protocols
        "2001:db8::/32",
        "2002::/16",  # 6to4, which embeds an IPv4 address
        "3fff::/20",
    )
)
"""Networks that some version of Python counts as global."""
_UNICAST = ip_network("2000::/3")  # without IPv4-mapped and -compatible addresses, and without NAT64

_is_name = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]").fullmatch
_is_host = re.compile(r"[a-z0-9.-]+", re.IGNORECASE).fullmatch
_is_plain = re.compile(r"[!#-;=?-\[\]_a-z~]+", re.IGNORECASE).fullmatch  # no blanks, backslashes or controls


class AllowList:
    """Hosts and networks that are reached although they are not public, also by ``http``.

    Raises :class:`~outboxio.ConfigurationError` for an entry that is neither a network nor a host name.
    """

    def __init__(self, allow: Iterable[str]) -> None:
        if isinstance(allow, str):
            raise ConfigurationError(f"allow={allow!r} is one string; give a list: [{allow!r}]")
        self._names: set[str] = set()
        self._networks: list[Network] = []
        for entry in allow:
            try:
                self._networks.append(ip_network(entry))
            except ValueError:
                if not _is_host(str(entry)):
                    raise ConfigurationError(
                        f"allow has {briefly(entry)}; expected networks such as '10.0.0.0/8', and host names"
                    ) from None
                self._names.add(entry.lower())

    def has_host(self, host: str) -> bool:
        """True for an allowed name, or for an address in an allowed network."""
        address = _address(host)
        return host in self._names if address is None else self.has_address(address)

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def admits(self, host: str, address: Address) -> bool:
        """True if a connection to ``host`` may go to this address."""
        return host in self._names or self.has_address(address) or is_public(address)


def is_public(address: Address) -> bool:
    """True for a unicast address of the public Internet."""
    if address.version == 6 and address not in _UNICAST:
        return False
    return address.is_global and not any(address in network for network in _FORBIDDEN)


def checked_url(url: str, allowed: AllowList) -> httpcore.URL:
    """The URL to request. Raises :class:`~outboxio.Unprocessable` for a URL that is never requested."""
    if len(url) > LONGEST_URL:
        raise _refused(f"it has {len(url)} characters, and {LONGEST_URL} are allowed")
    if not _is_plain(url):
        raise _refused("it has a character that needs escaping; host names are written in ASCII (xn--...)")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _refused("it cannot be parsed") from None
    is_allowed = allowed.has_host(host)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_allowed):
        raise _refused(f"its scheme is {parts.scheme[:20]!r}; expected 'https'")
    if "@" in parts.netloc:
        raise _refused("it has a user name or a password")
    if not is_allowed:
        address = _address(host)
        if address is None and (len(host) > 253 or not _is_name(host)):
            raise _refused(f"{host[:80]!r} is not a full domain name")
        if address is not None and not is_public(address):
            raise _refused(f"{host} is not a public address")
        if port is not None and port != 443 and port < 1024:
            raise _refused(f"port {port} is not 443, and below 1024")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return httpcore.URL(scheme=parts.scheme, host=host, port=port, target=target)


def _refused(reason: str) -> Unprocessable:
    return Unprocessable(f"the URL of the endpoint is refused: {reason}")


def _address(host: str) -> Address | None:
    try:
        return None if "%" in host else ip_address(host)
    except ValueError:
        return None


async def resolve(host: str, port: int, limiter: anyio.CapacityLimiter) -> list[str]:
    """The addresses of a host name. Raises :class:`OSError` for a name without addresses.

    In threads of its own: a slow name server must not keep the application's threads.
    """
    read = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await anyio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=limiter)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections to checked addresses only. TLS still verifies the certificate against the host name."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._backend = httpcore.AnyIOBackend()
        self._limiter = anyio.CapacityLimiter(MOST_RESOLVING)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        with anyio.fail_after(timeout):
            addresses = [host] if _address(host) else await resolve(host, port, self._limiter)
            for address in addresses:
                if not self._allowed.admits(host, ip_address(address)):
                    raise httpcore.ConnectError(f"{host} resolves to {address}, which is not a public address")
            failure: Exception = httpcore.ConnectError(f"{host} has no address")
            for address in addresses[:MOST_TRIED]:
                try:
                    return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
                except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                    failure = error
            raise failure
