"""A TCP proxy between outboxio and a server, which can be cut, come and go, and fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from tests.kit.mysql import scheme_of
from tests.kit.ports import free_port

USUAL_PORTS = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306}


class Link:
    """A connection through the proxy: its first bytes, and its state."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.task: asyncio.Task[None] | None = None
        self.ends: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        for end in self.ends:
            end.transport.abort()


class Proxy:
    """Forwards to the server of ``url``; its own ``url`` leads through the proxy."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port or USUAL_PORTS[scheme_of(url)])
        self._port = free_port()
        user = parts.netloc.rpartition("@")[0]
        user = f"{user}@" if user else ""
        self.url = parts._replace(netloc=f"{user}127.0.0.1:{self._port}").geturl()
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._flows = True
        self._last_words: bytes | None = None
        self._cuts_before: bytes | None = None
        self._cuts_after: bytes | None = None
        self._delay = 0.0

    async def start(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)

    async def stop(self) -> None:
        """Cut every connection, and take no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        while tasks := [link.task for link in self._links if link.task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)  # by then, just accepted connections are links, and aborted links are closed

    def fall_silent(self, sent: bytes = b"") -> int:
        """Keep connections open, and let no byte through: the network swallows packets.

        Affects the connections that have sent the given bytes; without bytes, all connections, new connections too.
        Returns their number.
        """
        silent = [link for link in self._links if sent in link.sent]
        for link in silent:
            link.flowing.clear()
        self._flows = self._flows and bool(sent)
        return len(silent)

    def fall_silent_after(self, words: bytes) -> None:
        """The next connection that sends the given bytes gets them through, and no byte after them, in no direction."""
        self._last_words = words

    @property
    def waits_for_last_words(self) -> bool:
        return self._last_words is not None

    def cut(self) -> int:
        """Cut every connection, accept new connections, and return the number of cuts."""
        links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def cut_at(self, words: bytes, *, lets_through: bool) -> None:
        """Cut the next connection that sends the given bytes: before or right after the bytes get through."""
        self._cuts_after, self._cuts_before = (words, None) if lets_through else (None, words)

    def delay(self, seconds: float) -> None:
        """Delay all bytes by so many seconds."""
        self._delay = seconds

    def speak_again(self) -> None:
        self._flows = True
        for link in self._links:
            link.flowing.set()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link()
        if not self._flows:
            link.flowing.clear()
        self._links.add(link)
        link.task = asyncio.ensure_future(self._run(link, reader, writer))
        link.ends.append(writer)
        link.task.add_done_callback(lambda _: self._ended(link))

    def _ended(self, link: Link) -> None:
        self._links.discard(link)
        for end in link.ends:  # a task that was cancelled before its first step, or in its last step, did not
            end.transport.abort()

    async def _run(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connecting = asyncio.ensure_future(asyncio.open_connection(*self._target))
        try:
            back_reader, back_writer = await asyncio.shield(connecting)
        except OSError:
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            with suppress(OSError):
                (await connecting)[1].transport.abort()
            writer.transport.abort()
            raise
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
            for end in (writer, back_writer):
                end.transport.abort()
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
                if remember and self._last_words is not None and self._last_words in data.lower():
                    self._last_words = None
                    link.flowing.clear()
                if self._delay:
                    await asyncio.sleep(self._delay)
                if remember and self._cuts_before is not None and self._cuts_before in data.lower():
                    self._cuts_before = None
                    link.cut()
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
        proxy.speak_again()
        await proxy.stop()
