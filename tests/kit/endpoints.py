"""Real HTTP servers on this machine that receive outgoing webhooks in the event loop of the test."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct

from tests.kit.serving import serving

SECRET, OTHER_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_bmV3IHNlY3JldCBvZiB0aGUgY3VzdG9tZXI="
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Request(Struct):
    headers: dict[str, str]
    body: str


class Receiver:
    """``requests``: what was posted. ``answers``: raw answers, each used once before ``answer``; ``None`` for never."""

    def __init__(self, port: int, scheme: str) -> None:
        self.port = port
        self.url = f"{scheme}://127.0.0.1:{port}/hooks"
        self.requests: list[Request] = []
        self.answers: list[bytes | None] = []
        self.answer: bytes | None = OK
        self.connections = self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines) if name}
                body = (await reader.readexactly(int(headers["content-length"]))).decode()
                self.requests.append(Request(headers, body))
                answer = self.answers.pop(0) if self.answers else self.answer
                if answer is not None:
                    writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1


def answer(status: int, body: str = "", **headers: str) -> bytes:
    """A raw answer; ``Retry_After`` is the header ``Retry-After``."""
    lines = [f"HTTP/1.1 {status} Response", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return ("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body])).encode()


@asynccontextmanager
async def receiving(host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """A receiver that listens; its connections are closed at the end."""
    received: list[Receiver] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await received[0].serve(reader, writer)

    async with serving(serve, host, context) as port:
        received.append(Receiver(port, "http" if context is None else "https"))
        yield received[0]
