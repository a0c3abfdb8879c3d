"""Lock plans: which cluster locks a process takes, and which locks it gives back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import LockGrant


class LockMoves(Struct, frozen=True):
    """The work of a round: the locks to give back, and the locks to try afterwards."""

    back: Sequence[LockName]
    tries: Sequence[LockName]


class LockPlan(Protocol):
    """Decides which locks this process takes and gives back."""

    @property
    def names(self) -> Collection[LockName]:
        """The locks that this process may hold."""
        ...

    @property
    def has_more(self) -> bool:
        """True if the plan has further moves as soon as a round has taken locks."""
        ...

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        """The moves of the next round. ``held``: the locks that this process has taken."""
        ...

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None:
        """Hear of the locks that a round has taken."""
        ...

    def given_back(self, names: Collection[LockName]) -> None:
        """Hear of the locks that a round has given back."""
        ...


class EveryLock:
    """The plan of a process that shares no handler: try every lock, and give no lock back."""

    has_more = False

    def __init__(self, names: Iterable[LockName]) -> None:
        self.names: Collection[LockName] = list(names)

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        return LockMoves((), [name for name in self.names if name not in held])

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None: ...

    def given_back(self, names: Collection[LockName]) -> None: ...
