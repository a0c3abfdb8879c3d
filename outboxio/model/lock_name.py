"""Slots, and the names of cluster locks, leases and wake-up channels.

Names are readable where they are shown, and hashed where their length is limited.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Literal, NamedTuple

from msgspec import Struct

from outboxio.model.notification import Notification

Role = Literal["fanout", "dispatch", "probe", "inbox", "consume", "since", "jobs", "lock", "gate"]

_LEASE_LENGTH = 255


MAX_PARTITIONS = 64  # of a handler


class Slot(NamedTuple):
    """A partition of a stored handler name, whose notifications are found, run and settled by one process at a time.

    A process holds a cluster lock and a lease for each slot. A handler with aliases has slots for each name. A slot is
    a tuple, because dispatch looks up the slot of each row.
    """

    handler_name: str
    partition: int = 0

    def holds(self, row: Notification) -> bool:
        """True if a notification belongs to the slot."""
        return row.handler_name == self.handler_name and row.partition_number == self.partition

    def __str__(self) -> str:
        """Return the slot in a log line: ``'score'``, or ``'score', partition 3``."""
        return f"{self.handler_name!r}, partition {self.partition}" if self.partition else repr(self.handler_name)


class LockName(Struct, frozen=True, order=True):
    """The name of a cluster lock: a role in a namespace, for dispatch with a handler name and a partition.

    A keyed lock (``outbox.lock``) has the role ``lock``, and its key as the handler name. The names for partition 0 are
    those of versions without partitions, so that such processes and newer ones exclude each other.
    """

    namespace: str
    role: Role
    handler_name: str = ""
    partition: int = 0

    @property
    def slot(self) -> Slot:
        """The slot that a lock of the role ``dispatch`` covers."""
        return Slot(self.handler_name, self.partition)

    @property
    def lease(self) -> str:
        """The key of the row in ``leases``: readable for operators, shortened with a digest if it is too long."""
        parts = (self.namespace, self.role, self.handler_name, str(self.partition) if self.partition else "")
        whole = "/".join(_escaped(part) for part in parts if part)
        return whole if len(whole) <= _LEASE_LENGTH else f"{whole[: _LEASE_LENGTH - 33]}~{self.digest.hex()[:32]}"

    @property
    def digest(self) -> bytes:
        """32 bytes that differ for different names."""
        partition = (str(self.partition),) if self.partition else ()
        parts = ("outboxio", self.namespace, self.role, self.handler_name, *partition)
        return sha256("\0".join(parts).encode()).digest()

    @property
    def key(self) -> int:
        """A signed 64-bit number, for advisory locks."""
        return int.from_bytes(self.digest[:8], "big", signed=True)

    @property
    def text(self) -> str:
        """At most 64 ASCII characters, for GET_LOCK and file names."""
        return f"outboxio-{self.digest.hex()[:48]}"


def _escaped(part: str) -> str:
    """Without this, the namespace ``a/dispatch/b`` and the handler ``b/fanout`` of ``a`` would share a lease."""
    return part.replace("%", "%25").replace("/", "%2F")


def channel_name(namespace: str) -> str:
    """Return the wake-up channel of a namespace."""
    return f"outboxio_{sha256(namespace.encode()).hexdigest()[:32]}"
