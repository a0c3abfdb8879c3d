"""MySQL and MariaDB: what they write differently, and everything else in one text.

Statements are written once, with a word in braces where the two differ: ``{text}`` for the type of our text columns
within JSON_TABLE, say. A server tells which of the two it is when it is connected to, whatever its URL says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from outboxio.storage.dedicated import STATEMENT_TIMEOUT
from outboxio.waiting import TimeLimit


class Flavour(Struct, frozen=True):
    """One of the two products."""

    name: str
    product: str
    oldest: tuple[int, int, int]
    isolation: str
    """The session variable of the isolation level."""
    collation: str
    """Of expressions on our connections. Where several collations meet in one expression, it must be this one."""
    can_refuse_to_wait: bool
    """Whether a statement can say that it will not wait for a lock, without saying so for a whole session."""
    aggregates_in_files: bool
    """Whether to make one long text of several rows takes a table in a file."""
    words: Mapping[str, str]

    def says(self, version: str) -> bool:
        """Whether a server that greets with this version is of this product."""
        return ("mariadb" in version.lower()) == (self.name == "mariadb")


# {text}, {document}: a text column within JSON_TABLE, comparable with ours; without a character set of its own it would
# have the selected database's, and lose what does not fit. {collate}: makes any other text comparable with ours. {id}:
# the type of an id within JSON_TABLE; {id_of}: an id of there, as our columns have them. {hashing}: before a statement
# whose joins may hash. {unwaiting}: before one that fails where it would wait for a lock, if it can be told to.
MYSQL = Flavour(
    name="mysql",
    product="MySQL",
    oldest=(8, 0, 17),
    isolation="transaction_isolation",
    collation="utf8mb4_0900_bin",
    can_refuse_to_wait=False,
    aggregates_in_files=False,
    words={
        "text": "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin",
        "document": "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin",
        "collate": "COLLATE utf8mb4_0900_bin",
        "hashing": "",
        "unwaiting": "",
        "id": "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
        "id_of": "{}",
    },
)
MARIADB = Flavour(
    name="mariadb",
    product="MariaDB",
    oldest=(10, 11, 0),
    isolation="tx_isolation",
    collation="utf8mb4_bin",
    can_refuse_to_wait=True,
    aggregates_in_files=True,
    words={
        "text": "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin",
        "document": "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        "collate": "COLLATE utf8mb4_nopad_bin",
        "hashing": "SET STATEMENT join_cache_level = 4 FOR",
        "unwaiting": "SET STATEMENT innodb_lock_wait_timeout = 0 FOR",
        "id": "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
        "id_of": "CAST({} AS UUID)",
    },
)
FLAVOURS = {flavour.name: flavour for flavour in (MYSQL, MARIADB)}

Statement = Mapping[str, str]
"""One statement by the name of the flavour."""

_ID_OF = re.compile(r"\{id_of ([a-z.]+)\}")


def in_both(text: str) -> Statement:
    """The statement as each of the two takes it."""
    return {name: _spelled(text, flavour) for name, flavour in FLAVOURS.items()}


def _spelled(text: str, flavour: Flavour) -> str:
    for word in ("text", "document", "collate", "hashing", "unwaiting", "id"):
        text = text.replace(f"{{{word}}}", flavour.words[word])
    return _ID_OF.sub(lambda match: flavour.words["id_of"].format(match[1]), text)


class Server:
    """What is known of the server behind one shard: a guess until the first connection, and then the truth."""

    def __init__(self, flavour: Flavour) -> None:
        self.flavour = flavour
        self.largest_packet = 16 * 2**20
        """``max_allowed_packet``: the longest statement that it takes, in bytes."""
        self.unanswered = TimeLimit(STATEMENT_TIMEOUT)
        """For what actions have sent."""

    def greeted_by(self, connection: Any) -> None:
        """Learn from a new connection which product it is."""
        self.flavour = next(f for f in FLAVOURS.values() if f.says(connection.get_server_info()))

    def spell(self, statement: Statement) -> str:
        return statement[self.flavour.name]
