"""A server that refuses every connection with an error of the real server: too many connections, a wrong password."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.kit.serving import serving

_SSL_REQUEST = 80877103


@asynccontextmanager
async def refusing_server(scheme: str, code: str, message: str) -> AsyncGenerator[str]:
    """The URL of a server that refuses: ``code`` is a SQLSTATE of PostgreSQL, or an error number of MySQL."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if scheme == "postgresql":
                await _read_startup(reader, writer)
                writer.write(_postgres_error(code, message))
            else:
                writer.write(_mysql_error(int(code), message))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has closed the connection first

    async with serving(refuse) as port:
        yield f"{scheme}://app:s3cret@127.0.0.1:{port}/app"


async def _read_startup(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read the first message, and decline a request for TLS before it."""
    length, version = struct.unpack("!II", await reader.readexactly(8))
    if version == _SSL_REQUEST:
        writer.write(b"N")
        length, _ = struct.unpack("!II", await reader.readexactly(8))
    await reader.readexactly(length - 8)


def _postgres_error(code: str, message: str) -> bytes:
    fields = {"S": "FATAL", "V": "FATAL", "C": code, "M": message}
    body = b"".join(f"{name}{value}\0".encode() for name, value in fields.items()) + b"\0"
    return b"E" + struct.pack("!I", len(body) + 4) + body


def _mysql_error(number: int, message: str) -> bytes:
    body = b"\xff" + struct.pack("<H", number) + b"#HY000" + message.encode()
    return struct.pack("<I", len(body))[:3] + b"\0" + body
