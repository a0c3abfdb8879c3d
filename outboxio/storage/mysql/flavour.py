"""The differences between MySQL and MariaDB. Statements are written once, with a word in braces for a difference.

Example: ``{text}`` is the type of our text columns within JSON_TABLE. The server, and not the URL, decides between
MySQL and MariaDB: the server names the product when a connection is opened.
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
    """The session variable that makes all transactions read only."""
    collation: str
    """The collation of expressions on our connections; an expression with several collations needs this collation."""
    can_refuse_to_wait: bool
    """True if a single statement can refuse to wait for a lock. On MySQL only the whole session can."""
    aggregates_in_files: bool
    """True if an aggregate of several long texts takes a temporary table in a file."""
    words: Mapping[str, str]
    loop_settings: Mapping[str, int] = {}
    """Further session settings of the connections of loops."""

    def says(self, version: str) -> bool:
        """True if a server with this version in the greeting is of this product."""
        return ("mariadb" in version.lower()) == (self.name == "mariadb")


# The words in braces:
# * {text}, {document}: the type of a text column within JSON_TABLE, comparable with our columns. Without a character
#   set the column would have the character set of the selected database, and lose characters.
# * {collate}: makes any further text comparable with our columns.
# * {id}: the type of an id within JSON_TABLE; {id_of x}: such an id in the type of our id columns.
# * {last_error}: the type and the message of the last error of a notification ``n``. On MariaDB a path is not constant:
#   after an empty array, MariaDB finds nothing at a constant path from the end in the rest of the rows. And MariaDB
#   stops at what a single path finds, but reads the whole document for two paths.
# * {hashing}: in front of a statement with joins that may hash.
# * {dead}: the DEAD and EXPIRED rows in the index event_notifications_dead; {dead_name}, {dead_date}: its columns.
# * {may_have}: a condition of each document of errors with a word in the last error. On MariaDB a document is a text,
#   where a word is found faster than the last error. The word is a part of the text, unless the document has an ASCII
#   letter as an escape sequence.
# * {unwaiting}: in front of a statement that must fail instead of waiting for a lock, where the product can do so.
MYSQL = Flavour(
    name="mysql",
    product="MySQL",
    oldest=(8, 0, 17),
    isolation="transaction_isolation",
    read_only="transaction_read_only",
    collation="utf8mb4_0900_bin",
    can_refuse_to_wait=False,
    aggregates_in_files=False,
    words={
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
    # Each statement of a loop has a time limit of its own here, in the process.
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
    words={
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
    # A JSON column of MariaDB is a text with the constraint json_valid, and each UPDATE of a row proves all constraints
    # of the row: an eighth of the server's work of a drain. Loops write only JSON that the server itself or msgspec has
    # made. max_statement_time: each statement of a loop has a time limit of its own here, in the process.
    loop_settings={"check_constraint_checks": 0, "max_statement_time": 0},
)
FLAVOURS = {flavour.name: flavour for flavour in (MYSQL, MARIADB)}

Statement = Mapping[str, str]
"""A statement for each product, by the name of the flavour."""

_ID_OF = re.compile(r"\{id_of ([a-z.]+)\}")


def for_flavours(text: str) -> Statement:
    """The statement in the spelling of each product."""
    return {name: _spelled(text, flavour) for name, flavour in FLAVOURS.items()}


def by_flavour(*, mysql: str, mariadb: str) -> Statement:
    """The statement of each product, where the products need different statements."""
    return {MYSQL.name: _spelled(mysql, MYSQL), MARIADB.name: _spelled(mariadb, MARIADB)}


def _spelled(text: str, flavour: Flavour) -> str:
    for word, spelling in flavour.words.items():
        text = text.replace(f"{{{word}}}", spelling)
    return _ID_OF.sub(lambda match: flavour.words["id_of"].format(match[1]), text)


class Server:
    """The server behind a shard: the product that the URL names, and after the first connection the real product."""

    def __init__(self, flavour: Flavour, limits: Limits, give_up: Callable[[Any], None]) -> None:
        """``give_up`` ends a connection without an answer in time."""
        self.flavour = flavour
        self.largest_packet = 16 * 2**20
        """``max_allowed_packet``: the longest statement that the server accepts, in bytes."""
        self.give_up = give_up
        self._limits = limits
        self.begin_anew()

    def begin_anew(self) -> None:
        """A new event loop takes over: the timers belong to an event loop."""
        self.unanswered = TimeLimit(self._limits.statement_timeout)
        """The time limit of our own statements for actions."""
        longest = self._limits.action_statement_timeout
        self.longest_statement = TimeLimit(longest) if longest else None
        """The time limit of statements of the application; ``None`` without a limit."""

    def greeted_by(self, connection: Any) -> None:
        """Learn the product from a new connection."""
        self.flavour = next(f for f in FLAVOURS.values() if f.says(connection.get_server_info()))

    def spell(self, statement: Statement) -> str:
        return statement[self.flavour.name]
