"""The traffic between a process and its databases: messages, rows, bytes, and the pending requests."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.wire import Wire, watched


class PostgresAnswers:
    """The messages of a PostgreSQL server: when the server waits for the client, and the number of rows."""

    _ENDS = frozenset(b"ZnT")  # ready for a query; the ends of a description
    _PASSWORD_ASKED = frozenset((3, 5, 10, 11))  # authentication messages to which the client answers

    def __init__(self) -> None:
        self.rows = 0
        self._unread = b""

    def read(self, data: bytes) -> bool:
        """Parse the received bytes; return True if the server waits for the client."""
        if data in (b"N", b"S"):  # the answer about TLS
            return True
        data, position, waits = self._unread + data, 0, False
        while position + 5 <= len(data):
            kind, (length,) = data[position : position + 1], struct.unpack_from(">I", data, position + 1)
            body = data[position + 5 : position + 1 + length]
            if len(body) < length - 4:
                break
            self.rows += kind == b"D"
            waits = kind[0] in self._ENDS or (
                kind == b"R" and struct.unpack_from(">I", body)[0] in self._PASSWORD_ASKED
            )
            position += 1 + length
        self._unread = data[position:]
        return waits and not self._unread


class MysqlAnswers:
    """The same for the packets of a MySQL or MariaDB server, which begin with its greeting."""

    _MORE = 8  # the flag of a status that announces a further result

    def __init__(self) -> None:
        self.rows = 0
        self._unread = b""
        self._take = self._greeting

    def read(self, data: bytes) -> bool:
        """Parse the received bytes; return True if the server waits for the client."""
        data, position, waits = self._unread + data, 0, False
        while position + 4 <= len(data):
            length = int.from_bytes(data[position : position + 3], "little")
            packet = data[position + 4 : position + 4 + length]
            if len(packet) < length:
                break
            waits = self._take(packet)
            position += 4 + length
        self._unread = data[position:]
        return waits and not self._unread

    def _greeting(self, packet: bytes) -> bool:
        self._take = self._login
        return True

    def _login(self, packet: bytes) -> bool:
        if packet[0] == 0:
            self._take = self._result
        return packet[:2] != b"\1\3"  # the password is right, and OK follows

    def _result(self, packet: bytes) -> bool:
        if packet[0] == 0xFF:
            return True
        if packet[0] == 0:
            status = _behind_number(packet, _behind_number(packet, 1))
            return not packet[status] & self._MORE
        self._take = self._column
        return False

    def _column(self, packet: bytes) -> bool:
        if _is_end(packet):
            self._take = self._row
        return False

    def _row(self, packet: bytes) -> bool:
        if packet[0] == 0xFF or _is_end(packet):
            self._take = self._result
            return packet[0] == 0xFF or not packet[3] & self._MORE
        self.rows += 1
        return False


def _is_end(packet: bytes) -> bool:
    return packet[0] == 0xFE and len(packet) < 9


def _behind_number(packet: bytes, position: int) -> int:
    """The position after a length-encoded integer of MySQL."""
    return position + 1 + {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(packet[position], 0)


class Traffic(Wire):
    """Counts what goes through the sockets of databases. ``rows_written`` is counted elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_written = self.bytes_sent = 0
        self.awaited: set[int] = set()
        """The sockets that wait for an answer of the server."""
        self._answers: dict[int, PostgresAnswers | MysqlAnswers] = {}
        self._former_rows = 0

    @property
    def rows_read(self) -> int:
        return self._former_rows + sum(answers.rows for answers in self._answers.values())

    def opened(self, number: int, protocol: object) -> None:
        """A driver has opened a connection."""
        if former := self._answers.pop(number, None):
            self._former_rows += former.rows
        is_postgres = type(protocol).__module__.startswith("asyncpg")
        self._answers[number] = PostgresAnswers() if is_postgres else MysqlAnswers()
        (self.awaited.discard if is_postgres else self.awaited.add)(number)  # MySQL speaks first

    def sent(self, transport: Any, data: bytes | bytearray | memoryview) -> None:
        number = transport.get_extra_info("socket").fileno()
        if number in self._answers:
            super().sent(transport, data)
            self.bytes_sent += len(data)
            self.awaited.add(number)

    def received(self, number: int, data: bytes) -> None:
        """The process has read from a socket; nothing, if the server has closed it."""
        if number in self._answers and (self._answers[number].read(data) or not data):
            self.awaited.discard(number)


@contextmanager
def seen() -> Iterator[Traffic]:
    """Count the traffic of connections passed to :meth:`Traffic.opened`."""
    traffic, recv = Traffic(), socket.socket.recv

    def watched_recv(self: socket.socket, *args: Any) -> bytes:
        data = recv(self, *args)
        traffic.received(self.fileno(), data)
        return data

    with watched(traffic):
        socket.socket.recv = watched_recv  # type: ignore[method-assign, assignment]  # asyncio reads with it
        try:
            yield traffic
        finally:
            del socket.socket.recv
