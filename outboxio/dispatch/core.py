"""The core of a dispatcher, which all its parts share."""

from __future__ import annotations

from msgspec.structs import asdict

from outboxio.dispatch.scheduler import Scheduler
from outboxio.dispatch.settler import Settler
from outboxio.dispatch.state import Shared


class Core(Shared, frozen=True):
    """The state of a dispatcher, with its scheduler and settler."""

    scheduler: Scheduler
    settler: Settler

    @classmethod
    def of(cls, shared: Shared) -> Core:
        """Create the core of a new dispatcher."""
        return cls(**asdict(shared), scheduler=Scheduler(shared), settler=Settler(shared))
