"""The messages of a process to its databases: every message that waits for an answer, and every statement in it.

The messages are read off the sockets, so that the driver's own messages count too: preparing a statement, resetting a
connection, fetching warnings. SQLite has no wire; there, statements are counted where they run.
"""

from __future__ import annotations

import re
import sqlite3
import struct
from asyncio import selector_events
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_QUOTED = re.compile(r"'(?:[^'\\]|\\.|'')*'|`[^`]*`")
_SYNCS = frozenset(b"QSH")  # a simple query, the end of an extended one, a flush: the client waits after each
_COM_QUERY = 3
_SHORT = 4096  # bytes


class Wire:
    """Counts messages while it watches; with ``keeps_texts`` it also keeps the statements."""

    def __init__(self, *, keeps_texts: bool = False) -> None:
        self.round_trips = 0
        self.texts: list[str] = []
        self._counted = 0
        self._uncounted: list[bytes] = []
        self._keeps_texts = keeps_texts
        self._prepared: dict[tuple[int, bytes], str] = {}

    @property
    def statements(self) -> int:
        """The number of statements. Short messages are parsed only here, because a clock may run during the sending."""
        uncounted, self._uncounted = self._uncounted, []
        self._counted += sum(map(number_of_statements, uncounted))
        return self._counted

    def sent(self, transport: Any, data: bytes | bytearray | memoryview) -> None:
        """A driver has written to a socket."""
        if type(transport.get_protocol()).__module__.startswith("asyncpg"):
            self._sent_to_postgres(id(transport), bytes(data))
        else:
            self._sent_to_mysql(bytes(data))

    def ran(self, text: str) -> None:
        """A statement was run."""
        self._counted += 1
        if self._keeps_texts:
            self.texts.append(text.strip())

    def _ran_all(self, message: bytes) -> None:
        """The statements of a message were run."""
        if self._keeps_texts:
            for text in statements_in(message.decode("utf8", "replace")):
                self.ran(text)
        elif len(message) > _SHORT:
            self._counted += number_of_statements(message)
        else:
            self._uncounted.append(message)

    def _sent_to_postgres(self, connection: int, data: bytes) -> None:
        place, waits = 0, False
        while (
            place + 5 <= len(data) and data[place]
        ):  # the message that opens a session has no kind byte, and begins with its length
            kind, (length,) = data[place], struct.unpack_from(">I", data, place + 1)
            body = data[place + 5 : place + 1 + length] if kind in b"QPB" else b""
            waits = waits or kind in _SYNCS
            if kind == ord("Q"):
                self._ran_all(body[:-1])
            elif kind == ord("P"):
                name, prepared, _ = body.split(b"\0", 2)
                self._prepared[connection, name] = prepared.decode()
            elif kind == ord("B"):
                self.ran(self._prepared.get((connection, body.split(b"\0", 2)[1]), "?"))
            place += 1 + length
        self.round_trips += waits

    def _sent_to_mysql(self, data: bytes) -> None:
        if (
            len(data) > 4 and data[3] == 0
        ):  # packet 0 of a command, not a later packet of a long command or of the handshake
            self.round_trips += 1
            if data[4] == _COM_QUERY:
                self._ran_all(data[5:])


def statements_in(message: str) -> list[str]:
    """The statements of a message that may hold several."""
    if ";" not in message:
        return [message]
    parts = _QUOTED.sub(lambda found: found[0].replace(";", ":"), message).split(";")
    return [part for part in parts if part.strip()]


def number_of_statements(message: bytes) -> int:
    """The number of statements that :func:`statements_in` finds, computed faster because a clock may run."""
    if b";" not in message:
        return 1
    if b"`" in message:
        return len(statements_in(message.decode("utf8", "replace")))
    if b"\\" in message:
        message = message.replace(rb"\\", b"").replace(rb"\'", b"")
    unquoted = b"".join(message.split(b"'")[::2])
    return sum(not part.isspace() for part in unquoted.split(b";") if part)


@contextmanager
def watched(wire: Wire | None = None, *, keeps_texts: bool = False) -> Iterator[Wire]:
    """Watch every message of this process. SQLite connections are watched if they are opened inside."""
    wire = wire or Wire(keeps_texts=keeps_texts)
    transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    write, connect = transport.write, sqlite3.connect

    def watched_write(self: Any, data: Any) -> None:
        wire.sent(self, data)
        write(self, data)

    class Cursor(sqlite3.Cursor):
        def execute(self, sql: str, *parameters: Any) -> Any:
            wire.ran(sql)
            return super().execute(sql, *parameters)

    def watched_class(base: Any) -> Any:
        class Connection(base):  # type: ignore[misc]  # of the class that the caller wants
            def execute(self, sql: str, *parameters: Any) -> Any:
                wire.ran(sql)
                return super().execute(sql, *parameters)

            def cursor(self, factory: Any = Cursor) -> Any:
                return super().cursor(factory)

        return Connection

    def watched_connect(*args: Any, **options: Any) -> Any:
        return connect(*args, **{**options, "factory": watched_class(options.get("factory", sqlite3.Connection))})

    transport.write, sqlite3.connect = watched_write, watched_connect
    try:
        yield wire
    finally:
        transport.write, sqlite3.connect = write, connect
