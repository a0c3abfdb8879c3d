"""What the parts of a dispatcher share: one value, which each part gets first."""

from __future__ import annotations

from msgspec.structs import asdict

from outboxio.dispatch.scheduler import Scheduler
from outboxio.dispatch.settler import Settler
from outboxio.dispatch.state import Shared


class Core(Shared, frozen=True):
    """The state of a dispatcher, with the two parts that every other part uses."""

    scheduler: Scheduler
    settler: Settler

    @classmethod
    def of(cls, shared: Shared) -> Core:
        """The core of a new dispatcher."""
        return cls(**asdict(shared), scheduler=Scheduler(shared), settler=Settler(shared))
