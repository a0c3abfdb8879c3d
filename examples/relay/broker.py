"""The broker between the services: a running NATS or RabbitMQ, else an installed ``nats-server``."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Protocol

import nats
import nats.errors

from examples.relay.rabbit import USUAL as USUAL_RABBIT
from examples.relay.rabbit import Rabbit
from outboxio import EventHandler, Outbox
from outboxio.integrations.brokers import BrokerInbox
from outboxio.integrations.nats import NatsInbox, NatsRelay

USUAL = "nats://127.0.0.1:4222"
PLACES = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/bin")


class Broker(Protocol):
    """A broker with a stream or queues for this run."""

    name: str

    async def prepare(self) -> None: ...

    async def remove(self) -> None: ...

    def relay(self) -> EventHandler[bytes]: ...

    def inbox(self, outbox: Outbox, group: str, /) -> BrokerInbox: ...

    async def restart(self) -> bool:
        """Restart the server. Return False if this run did not start it."""
        ...


class Nats:
    """A stream for this run on a NATS server. ``server`` is set if this run started the server."""

    def __init__(self, url: str, server: AsyncServer | None = None) -> None:
        self.url = url
        self.name = f"NATS at {url.removeprefix('nats://')}{', started for this run' if server else ''}"
        self._server = server
        self._stream = f"SHOP-{token_hex(3)}"

    async def prepare(self) -> None:
        """Create the stream for the shop's events."""
        client = await nats.connect(self.url)
        await client.jetstream().add_stream(name=self._stream, subjects=[f"{self._stream}.>"])
        await client.close()

    async def remove(self) -> None:
        """Remove the stream."""
        client = await nats.connect(self.url)
        await client.jetstream().delete_stream(self._stream)
        await client.close()

    def relay(self) -> EventHandler[bytes]:
        return NatsRelay(
            self.url, name="to-broker", types=("OrderChanged",), subject=f"{self._stream}.{{event_type}}", ordered=True
        )

    def inbox(self, outbox: Outbox, group: str) -> BrokerInbox:
        return NatsInbox(outbox, self.url, stream=self._stream, durable=group, ordered=True)

    async def restart(self) -> bool:
        """Restart the server. Return False if this run did not start it."""
        if self._server is None:
            return False
        await self._server.stop()
        await self._server.start()
        return True


class AsyncServer:
    """A NATS server for this run."""

    def __init__(self, program: str, home: Path, port: int) -> None:
        self._command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(home), "-l", str(home / "log")]
        self._port = port
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._command)
        async with asyncio.timeout(30):
            while not nats_answers(self._port):  # noqa: ASYNC110  # the server does not signal when it listens
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            await self._process.wait()
            self._process = None


@asynccontextmanager
async def some_broker(*, private: bool) -> AsyncIterator[Broker]:
    """Yield a broker for the services; ``private`` starts a server for this run even if another one is running.

    :raises LookupError: there is no broker; the message says how to install one.
    """
    broker = None if private else _found()
    server = None
    with tempfile.TemporaryDirectory() as home:
        if broker is None:
            server = AsyncServer(_program(), Path(home), port := _free_port())
            await server.start()
            broker = Nats(f"nats://127.0.0.1:{port}", server)
        try:
            await broker.prepare()
            try:
                yield broker
            finally:
                with suppress(OSError, nats.errors.Error):
                    await broker.remove()
        finally:
            if server is not None:
                await server.stop()


def _found() -> Broker | None:
    """Return the broker in the environment, else one that listens on its default port."""
    if url := os.environ.get("NATS_URL"):
        return Nats(url)
    if url := os.environ.get("RABBITMQ_URL"):
        return Rabbit(url)
    if nats_answers(4222):
        return Nats(USUAL)
    return Rabbit(USUAL_RABBIT) if _listens(5672) else None


def nats_answers(port: int) -> bool:
    """Return True if a NATS server listens on this local port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
        return connection.recv(4) == b"INFO"
    return False


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _program() -> str:
    found = shutil.which("nats-server", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *PLACES]))
    if found is None:
        raise LookupError(
            "no broker found: start NATS (docker run -p 4222:4222 nats -js), install nats-server (apt-get install "
            "nats-server, brew install nats-server), or set NATS_URL or RABBITMQ_URL"
        )
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
