"""The names of cluster locks, leases and wake-up channels: readable where shown, hashed where room is short."""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

from msgspec import Struct

Role = Literal["fanout", "dispatch", "probe", "inbox", "consume"]

_LEASE_LENGTH = 255


class LockName(Struct, frozen=True, order=True):
    """What one cluster lock excludes others from: a role in a namespace, for dispatch one handler name."""

    namespace: str
    role: Role
    handler_name: str = ""

    @property
    def lease(self) -> str:
        """The key of its row in ``leases``: as an operator reads it, shortened by a digest if it is too long."""
        whole = "/".join(_escaped(part) for part in (self.namespace, self.role, self.handler_name) if part)
        return whole if len(whole) <= _LEASE_LENGTH else f"{whole[: _LEASE_LENGTH - 33]}~{self.digest.hex()[:32]}"

    @property
    def digest(self) -> bytes:
        """32 bytes that differ for different names, whatever characters these hold."""
        return sha256("\0".join(("outboxio", self.namespace, self.role, self.handler_name)).encode()).digest()

    @property
    def key(self) -> int:
        """A signed 64-bit number, as advisory locks take it."""
        return int.from_bytes(self.digest[:8], "big", signed=True)

    @property
    def text(self) -> str:
        """At most 64 ASCII characters, as GET_LOCK and file names take it."""
        return f"outboxio-{self.digest.hex()[:48]}"


def _escaped(part: str) -> str:
    """Without this, the namespace ``a/dispatch/b`` and the handler ``b/fanout`` of ``a`` would share a lease."""
    return part.replace("%", "%25").replace("/", "%2F")


def channel_name(namespace: str) -> str:
    """The wake-up channel of a namespace."""
    return f"outboxio_{sha256(namespace.encode()).hexdigest()[:32]}"
