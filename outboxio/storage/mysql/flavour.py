"""The differences between MySQL and MariaDB. Statements are written once, with a placeholder for each difference.

For example, ``{text}`` is the type of text columns within JSON_TABLE. The server decides between MySQL and MariaDB,
not the URL: it sends its product name in the handshake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from outboxio.storage.connections.driver import Limits
from outboxio.support.aio import TimeLimit


class Flavour(Struct, frozen=True):
    """MySQL or MariaDB."""

    name: str
    product: str
    oldest: tuple[int, int, int]
    isolation: str
    """The session variable of the isolation level."""
    read_only: str
    """The session variable that makes all transactions read-only."""
    collation: str
    """The collation of expressions on loop connections, for expressions that mix several collations."""
    can_refuse_to_wait: bool
    """True if a lock wait timeout of 0 can be set for a single statement. MySQL can set it only for the session."""
    aggregates_in_files: bool
    """True if an aggregate of several long texts needs an on-disk temporary table."""
    fragments: Mapping[str, str]
    """The SQL for each placeholder."""
    loop_settings: Mapping[str, int] = {}
    """Additional session settings of loop connections."""

    def matches(self, version: str) -> bool:
        """True if the version string of a handshake is of this product."""
        return ("mariadb" in version.lower()) == (self.name == "mariadb")


# The placeholders:
# * {text}, {document}: the type of a text column within JSON_TABLE, comparable with outboxio's columns. Without a
#   character set, the column would have that of the selected database, and lose characters.
# * {collate}: makes any other text comparable with outboxio's columns.
# * {id}: the type of an id within JSON_TABLE; {id_of x}: such an id, converted to the type of outboxio's id columns.
# * {last_error}: the type and the message of the last error of a notification ``n``. On MariaDB, the path must not be
#   constant: after an empty array, a constant path from the end finds nothing in the remaining rows. Each path is
#   searched separately, because MariaDB reads the whole document for two paths.
# * {hashing}: in front of a statement that may use hash joins.
# * {dead}: the DEAD and EXPIRED rows in the index event_notifications_dead; {dead_name}, {dead_date}: its columns.
# * {may_have}: a prefilter for documents whose last error contains a word. On MariaDB, a document is text, in which
#   searching the word is faster than extracting the last error. The word is a part of the text, unless the document
#   escapes an ASCII letter.
# * {unwaiting}: in front of a statement that must fail instead of waiting for a lock, if the product supports it.
MYSQL = Flavour(
    name="mysql",
    product="MySQL",
    oldest=(8, 0, 17),
    isolation="transaction_isolation",
    read_only="transaction_read_only",
    collation="utf8mb4_0900_bin",
    can_refuse_to_wait=False,
    aggregates_in_files=False,
    fragments={
        "text": "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin",
        "document": "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin",
        "collate": "COLLATE utf8mb4_0900_bin",
        "hashing": "",
        "unwaiting": "",
        "last_error": "JSON_EXTRACT(n.errors, '$[last].type', '$[last].message')",
        "id": "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
        "id_of": "{}",
        "may_have": "TRUE",
        "dead": "TRUE",
        "dead_name": "n.dead_handler",
        "dead_date": "n.dead_date",
    },
    # The process itself limits the time of each statement.
    loop_settings={"max_execution_time": 0},
)
MARIADB = Flavour(
    name="mariadb",
    product="MariaDB",
    oldest=(10, 11, 0),
    isolation="tx_isolation",
    read_only="tx_read_only",
    collation="utf8mb4_bin",
    can_refuse_to_wait=True,
    aggregates_in_files=True,
    fragments={
        "text": "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin",
        "document": "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        "collate": "COLLATE utf8mb4_nopad_bin",
        "hashing": "SET STATEMENT join_cache_level = 4 FOR",
        "unwaiting": "SET STATEMENT innodb_lock_wait_timeout = 0 FOR",
        "last_error": """CONCAT('[', JSON_EXTRACT(n.errors, IF(n.attempts < -1, '', '$[-1].type')), ',',
    JSON_EXTRACT(n.errors, IF(n.attempts < -1, '', '$[-1].message')), ']')""",
        "id": "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
        "id_of": "CAST({} AS UUID)",
        "may_have": "(LOCATE(BINARY :word, BINARY n.errors) OR LOCATE(BINARY :escaped, BINARY n.errors))",
        "dead": "n.state IN ('DEAD', 'EXPIRED')",
        "dead_name": "n.handler_name",
        "dead_date": "n.updated_date",
    },
    # A JSON column of MariaDB is text with the constraint json_valid, and each UPDATE checks all constraints of a row:
    # an eighth of the server's work during a drain. Loops only write JSON that the server itself or msgspec has
    # encoded. max_statement_time: the process itself limits the time of each statement.
    loop_settings={"check_constraint_checks": 0, "max_statement_time": 0},
)
FLAVOURS = {flavour.name: flavour for flavour in (MYSQL, MARIADB)}

Statement = Mapping[str, str]
"""A statement for each product, by the name of the flavour."""

_ID_OF = re.compile(r"\{id_of ([a-z.]+)\}")


def for_flavours(text: str) -> Statement:
    """Return the statement for each product."""
    return {name: _expanded(text, flavour) for name, flavour in FLAVOURS.items()}


def by_flavour(*, mysql: str, mariadb: str) -> Statement:
    """Return the statement for each product, if they need different ones."""
    return {MYSQL.name: _expanded(mysql, MYSQL), MARIADB.name: _expanded(mariadb, MARIADB)}


def _expanded(text: str, flavour: Flavour) -> str:
    for name, fragment in flavour.fragments.items():
        text = text.replace(f"{{{name}}}", fragment)
    return _ID_OF.sub(lambda match: flavour.fragments["id_of"].format(match[1]), text)


class Server:
    """The server of a shard. Its flavour comes from the URL, and after the first connection from the server."""

    def __init__(self, flavour: Flavour, limits: Limits, on_timeout: Callable[[Any], None]) -> None:
        """``on_timeout`` is called with a connection on which the server did not respond in time."""
        self.flavour = flavour
        self.largest_packet = 16 * 2**20
        """``max_allowed_packet``: the longest statement that the server accepts, in bytes."""
        self.on_timeout = on_timeout
        self._limits = limits
        self.reset()

    def reset(self) -> None:
        """Create the timers again for a new event loop."""
        self.statement_limit = TimeLimit(self._limits.statement_timeout)
        """The time limit of outboxio's statements in actions."""
        longest = self._limits.action_statement_timeout
        self.action_statement_limit = TimeLimit(longest) if longest else None
        """The time limit of your application's statements; ``None`` without a limit."""

    def detect_flavour(self, connection: Any) -> None:
        """Detect the product from a connection."""
        self.flavour = next(f for f in FLAVOURS.values() if f.matches(connection.get_server_info()))

    def sql_for(self, statement: Statement) -> str:
        return statement[self.flavour.name]
