"""Webhook URLs of customers reach only public addresses; connections are counted at local listeners."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpcore
import pytest

from outboxio import Event, Outbox
from outboxio.integrations.webhooks import Endpoint, Webhooks, addresses, outgoing, sending
from tests.kit.app import Look, eventually
from tests.kit.endpoints import SECRET, receiving
from tests.kit.programs import programs

pytestmark = [pytest.mark.above_statements, pytest.mark.database]

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Shipped(Event):
    order: int


HOSTS = """
https://127.0.0.1:PORT/ https://127.1:PORT/ https://0:PORT/ https://0.0.0.0:PORT/ https://2130706433:PORT/
https://0x7f000001:PORT/ https://0x7f.1:PORT/ https://0x7f.0.0.0x1:PORT/ https://017700000001:PORT/
https://0177.0.0.1:PORT/ https://127.0.0.1.:PORT/ https://localhost:PORT/ https://LOCALHOST:PORT/ https://localhost.:PORT/
https://[::1]:PORT/ https://[::]:PORT/ https://[0:0:0:0:0:0:0:1]:PORT/ https://[::ffff:127.0.0.1]:PORT/
https://[::ffff:7f00:1]:PORT/ https://[::127.0.0.1]:PORT/ https://[2002:7f00:1::]:PORT/ https://[64:ff9b::7f00:1]:PORT/
https://[2001:0:7f00:1::]:PORT/ https://[fe80::1%25lo]:PORT/ https://[fd00:ec2::254]:PORT/ https://[ff02::1]:PORT/
https://169.254.169.254/ https://100.100.100.200/ https://168.63.129.16/ https://10.0.0.1:PORT/ https://192.0.0.192/
https://user:pass@127.0.0.1:PORT/ https://example.com@127.0.0.1:PORT/ https://127.0.0.1:PORT#@example.com/
https://example.com:22/ https://example.com\\@127.0.0.1:PORT/ http://127.0.0.1:PORT/ http://example.com/
ftp://127.0.0.1:PORT/ file:///etc/passwd gopher://127.0.0.1:PORT/ //127.0.0.1:PORT/ https://:PORT/ https://[::1:PORT/
https://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:PORT/ https://127。0。0。1:PORT/ https://xn--:PORT/ https://intranet:PORT/
https://loop.example.com:PORT/ https://mixed.example.com:PORT/ https://mapped.example.com:PORT/
https://rebinds.example.com:PORT/ https://nowhere.example.com:PORT/
"""
URLS = [
    *HOSTS.split(),
    "https://127.0.0.1:PORT/\r\nX: y",
    "https://127.0.0.1\t:PORT/",
    "https://example.com/" + "a" * 2048,
    "https://example.com/\u017f",
    "",
]

NAMES = {
    "loop.example.com": ["127.0.0.1"], "mixed.example.com": ["93.184.216.34", "127.0.0.1"],
    "mapped.example.com": ["::ffff:127.0.0.1"],
}  # fmt: skip


class Resolver:
    """A name server controlled by the customer: ``rebinds`` is public once, and then this machine."""

    def __init__(self, **names: list[str]) -> None:
        self.names = {**NAMES, **names}
        self.queried: list[str] = []

    async def __call__(self, host: str, port: int, limiter: Any) -> list[str]:
        self.queried.append(host)
        if host == "rebinds.example.com":
            return ["127.0.0.1"] if self.queried.count(host) > 1 else ["93.184.216.34"]
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.names[host]


async def test_hostile_urls_reach_nothing(make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver, connected = Resolver(), list[str]()
    monkeypatch.setattr(addresses, "resolve", resolver)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    connect = httpcore.AnyIOBackend.connect_tcp

    async def only_here(self: Any, host: str, port: int, *args: Any) -> Any:
        connected.append(host)
        if ip_address(host).is_loopback:
            return await connect(self, host, port, *args)
        raise httpcore.ConnectError("the public address is not reached in a test")

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", only_here)
    async with receiving("127.0.0.1") as v4, receiving("::1") as v6:
        urls = [url.replace("PORT", str(receiver.port)) for url in URLS for receiver in (v4, v6)]
        found = [Endpoint(url, [SECRET], str(number)) for number, url in enumerate(urls)]
        outbox = await make_outbox()
        outbox.add_handler(Webhooks(name="hooks", types=[Shipped], endpoints=found))
        async with outbox.transaction("ship") as tx:
            tx.emit(Shipped(1))
        assert (await outbox.drain()).succeeded == 1  # the handler that emits the deliveries
        assert len(URLS) > 40
        assert (v4.connections, v6.connections) == (0, 0)
        assert set(connected) == {"93.184.216.34"}  # the first response for the name that changes
        assert connected == ["93.184.216.34"]


@pytest.mark.parametrize("address", [
    "1.1.1.1", "93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "2a00:1450:4001::1",
])  # fmt: skip
def test_public_addresses_are_reached(address: str) -> None:
    assert addresses.is_public(ip_address(address))


@pytest.mark.parametrize("address", [
    "100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.88.99.1", "198.18.0.1", "198.51.100.1", "0.0.0.1",
    "172.16.0.1", "192.168.1.1", "169.254.1.1", "2001:db8::1", "3fff::1", "2002:808:808::", "64:ff9b::808:808",
    "64:ff9b:1::1", "::ffff:8.8.8.8", "::8.8.8.8", "fec0::1", "ff0e::1", "100::1", "2001:0:808:808::",
])  # fmt: skip
def test_special_addresses_are_not_public(address: str) -> None:
    assert not addresses.is_public(ip_address(address))


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for this host name, and its key."""
    file, key = directory / "cert.pem", directory / "cert.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(file)],
        check=True, capture_output=True,
    )  # fmt: skip
    return file, key


@pytest.mark.parametrize("certified", ["hooks.example.com", "other.example.com"])
async def test_the_certificate_must_match_the_host_name(
    make_outbox: MakeOutbox, look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, certified: str
) -> None:
    programs.need("openssl")
    file, key = certificate(tmp_path, certified)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    monkeypatch.setattr(addresses, "resolve", Resolver(**{"hooks.example.com": ["127.0.0.1"]}))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    async with receiving(context=context) as receiver:
        endpoint = Endpoint(f"https://hooks.example.com:{receiver.port}/", [SECRET])
        outbox = await make_outbox()
        outbox.add_handler(Webhooks(name="hooks", types=[Shipped], endpoints=[endpoint], allow=["127.0.0.1"]))
        async with outbox.transaction("ship") as tx:
            tx.emit(Shipped(1))
        await outbox.drain()
        is_right = certified == "hooks.example.com"
        assert len(receiver.requests) == is_right
        assert ("FAILED" in await look.states()) is not is_right
        await outbox.close()


@pytest.mark.parametrize("flood", [b"HTTP/1.1 100 Go on\r\n\r\n", b"1;" + b"x" * 2000 + b"\r\na\r\n"])
async def test_headers_and_framing_of_an_answer_are_limited_too(
    make_outbox: MakeOutbox, look: Look, flood: bytes
) -> None:
    async with receiving() as receiver:
        begin = b"" if flood.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        receiver.answer = begin + flood * 8000
        outbox = await make_outbox()
        found = [Endpoint(receiver.url, [SECRET])]
        outbox.add_handler(Webhooks(name="hooks", types=[Shipped], endpoints=found, allow=["127.0.0.0/8"]))
        async with outbox.transaction("ship") as tx:
            tx.emit(Shipped(1))
        await outbox.drain()
        (record,) = await outbox.admin.list(handler="hooks.deliveries")
        assert "the response is larger than 128 KiB" in str(record.errors)
        await outbox.close()


async def test_an_error_names_no_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "resolve", Resolver())
    with pytest.raises(httpcore.ConnectError, match=r"mixed\.example\.com resolves to an address that is not public$"):
        await addresses.CheckedBackend(addresses.AllowList([])).connect_tcp("mixed.example.com", 443, 5)


async def test_an_unresponsive_address_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = dict[str, float | None]()

    async def connect(self: Any, host: str, port: int, timeout: float | None, *args: Any) -> Any:
        tried[host] = timeout
        raise httpcore.ConnectTimeout

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    monkeypatch.setattr(addresses, "resolve", Resolver(**{"two.example.com": ["2606:4700::1111", "1.1.1.1"]}))
    with pytest.raises(httpcore.ConnectTimeout):
        await addresses.CheckedBackend(addresses.AllowList([])).connect_tcp("two.example.com", 443, 5)
    assert tried == {"2606:4700::1111": 2.5, "1.1.1.1": 2.5}


async def test_slow_name_servers_delay_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, queried = threading.Event(), list[str]()

    def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        queried.append(host)
        if host != "good.example.com":
            answered.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    limiter = anyio.CapacityLimiter(addresses.MOST_RESOLVING)
    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(addresses.resolve, f"slow{number}.example.com", 443, limiter)
        await eventually(lambda: len(queried) >= 32)
        assert await addresses.resolve("good.example.com", 443, limiter) == ["1.1.1.1"]
        answered.set()


async def test_pools_are_closed_once_when_many_hosts_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MOST_POOLS", 2)
    close = httpcore.AsyncConnectionPool.aclose

    async def slowly(self: Any) -> None:
        await anyio.lowlevel.checkpoint()
        await close(self)

    monkeypatch.setattr(httpcore.AsyncConnectionPool, "aclose", slowly)
    async with receiving("0.0.0.0") as receiver:
        sender = sending.Sender(10, 10, ["127.0.0.0/8"])
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                for number in range(1, 20):
                    url = f"http://127.0.0.{number}:{receiver.port}/"
                    tasks.start_soon(sender.send, Endpoint(url, [SECRET]), "msg", "{}")
        assert len(receiver.requests) == 38
        await sender.close()


def test_an_allow_list_ignores_case_and_accepts_an_iterator() -> None:
    allowed = addresses.AllowList(iter(["Billing.Internal", "10.0.0.0/8"]))
    assert allowed.admits("billing.internal", None)
    assert allowed.admits("x", ip_address("10.1.1.1"))


async def test_unused_endpoints_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "LANES", 2)
    (deliveries,) = Webhooks(name="hooks", types=[Shipped], endpoints=[]).companions()
    find: Any = deliveries._lane  # type: ignore[attr-defined]  # of the companion, whose class is private
    failing = find("failing")
    failing.failed(OSError())
    failing.failed(OSError())
    for number in range(5):
        find(str(number))
    assert find("failing") is failing
    assert find("4") is not find("0")
    assert len(deliveries._lanes) < 5  # type: ignore[attr-defined]
