"""A TCP proxy between outboxio and a server that can cut, refuse, delay or stall connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from tests.kit.mysql import scheme_of
from tests.kit.ports import free_port

USUAL_PORTS = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306}


class Link:
    """A connection through the proxy: its first bytes, and its state."""

    def __init__(self, accepted: socket.socket) -> None:
        self.accepted = accepted
        self.sent = bytearray()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.ends: list[asyncio.StreamWriter] = []

    def close(self) -> None:
        for end in self.ends:
            end.transport.abort()
        self.accepted.close()


class Proxy:
    """Forwards to the server of ``url``; its own ``url`` leads through the proxy."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port or USUAL_PORTS[scheme_of(url)])
        self._port = free_port()
        user = parts.netloc.rpartition("@")[0]
        user = f"{user}@" if user else ""
        self.url = parts._replace(netloc=f"{user}127.0.0.1:{self._port}").geturl()
        self._listener: socket.socket | None = None
        self._links: dict[Link, asyncio.Task[None]] = {}
        self._flows = True
        self._stall_after: bytes | None = None
        self._cuts_before: bytes | None = None
        self._cuts_after: bytes | None = None
        self._delay = 0.0

    async def start(self) -> None:
        """Take connections."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._listener.setblocking(False)
        # asyncio.Server loses a connection that it has accepted but not yet handed over when it is closed.
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    async def stop(self) -> None:
        """Cut every connection, and take no more."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        tasks = list(self._links.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stall(self, sent: bytes = b"") -> int:
        """Keep connections open but forward nothing, as when a network drops packets.

        Affects the connections that have sent the given bytes; without bytes, all connections, new connections too.
        Returns their number.
        """
        silent = [link for link in self._links if sent in link.sent]
        for link in silent:
            link.flowing.clear()
        self._flows = self._flows and bool(sent)
        return len(silent)

    def stall_after(self, words: bytes) -> None:
        """The next connection that sends the given bytes gets them through, and no byte after them, in no direction."""
        self._stall_after = words

    @property
    def waits_to_stall(self) -> bool:
        return self._stall_after is not None

    def cut(self) -> int:
        """Cut every connection, accept new connections, and return the number of cuts."""
        tasks = list(self._links.values())
        for task in tasks:
            task.cancel()
        return len(tasks)

    def cut_at(self, words: bytes, *, lets_through: bool) -> None:
        """Cut the next connection that sends the given bytes, before or right after they are forwarded."""
        self._cuts_after, self._cuts_before = (words, None) if lets_through else (None, words)

    @property
    def waits_to_cut(self) -> bool:
        return self._cuts_before is not None

    def delay(self, seconds: float) -> None:
        """Delay all bytes by so many seconds."""
        self._delay = seconds

    def resume(self) -> None:
        self._flows = True
        for link in self._links:
            link.flowing.set()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):  # the client has disconnected before
            link = Link(listener.accept()[0])
            if not self._flows:
                link.flowing.clear()
            self._links[link] = task = asyncio.ensure_future(self._run(link))
            task.add_done_callback(lambda _: self._ended(link))

    def _ended(self, link: Link) -> None:
        del self._links[link]
        link.close()  # a task that was cancelled before its first step has not closed it

    async def _run(self, link: Link) -> None:
        reader, writer = await asyncio.open_connection(sock=link.accepted)
        link.ends.append(writer)
        try:
            back_reader, back_writer = await asyncio.open_connection(*self._target)
        except OSError:
            return
        link.ends.append(back_writer)
        pumps = [
            asyncio.ensure_future(self._pump(link, reader, back_writer, remember=True)),
            asyncio.ensure_future(self._pump(link, back_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            link.close()
            for end in link.ends:
                with suppress(OSError):
                    await end.wait_closed()

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, remember: bool = False
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if remember and len(link.sent) < 65536:
                    link.sent += data
                await link.flowing.wait()
                if remember and self._stall_after is not None and self._stall_after in data.lower():
                    self._stall_after = None
                    link.flowing.clear()
                if self._delay:
                    await asyncio.sleep(self._delay)
                if remember and self._cuts_before is not None and self._cuts_before in data.lower():
                    self._cuts_before = None
                    return
                writer.write(data)
                await writer.drain()
                if remember and self._cuts_after is not None and self._cuts_after in data.lower():
                    self._cuts_after = None
                    link.ends[0].transport.abort()


@asynccontextmanager
async def proxy_to(url: str) -> AsyncIterator[Proxy]:
    """A proxy that takes connections already."""
    proxy = Proxy(url)
    await proxy.start()
    try:
        yield proxy
    finally:
        proxy.resume()
        await proxy.stop()
