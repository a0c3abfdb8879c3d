"""The part of an outbox that registers functions for findings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from outboxio.errors import RegistrationError
from outboxio.support.signature import is_async, missing_for
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.health.values import Finding

FindingHook: TypeAlias = "Callable[[Finding], Awaitable[None]]"

H = TypeVar("H", bound=Callable[..., Awaitable[Any]])


class FindingHooks(ABC):
    """The base class of :class:`~outboxio.Outbox` that registers functions for findings."""

    def __init__(self) -> None:
        self._finding_hooks: dict[str, FindingHook] = {}

    def on_finding(self, function: H) -> H:
        """Register an async function that is called when a finding of ``outbox.admin.overview()`` appears or ends.

        The function gets a :class:`Finding`. Its ``ended`` is ``None`` when the finding appears, and a time when it was
        absent from two consecutive evaluations. Findings are identified by ``rule``, ``handler``, ``job`` and
        ``shard``; ``since`` is set. They are evaluated every 15 s, in one of the processes in ``running()`` that have
        the function, which is identified by its qualified name. If another process takes over, findings are not
        repeated.

        Calls are made at least once: a call is repeated if the process crashes before recording it. A call that raises,
        or takes longer than 30 s, is logged and repeated at the next evaluation. Without such a function, nothing is
        evaluated. To detect that no process is running, use ``outboxio watch``.

        Raises :class:`RegistrationError` for a function that is not async, cannot be called with a finding, has the
        qualified name of a registered function, or is registered while ``running()`` is entered.

        Example::

            @outbox.on_finding
            async def page(finding: Finding) -> None:
                what = "resolved" if finding.ended else finding.level
                await pager.send(f"{what}: {finding.text}", action=finding.fix)
        """
        self._refuse_while_running()
        if not is_async(function):
            raise RegistrationError(f"on_finding got {briefly(function)}; expected an async function of a Finding")
        if (missing := missing_for(function, 1)) is not None:
            raise RegistrationError(f"on_finding calls a function with a Finding, and {briefly(function)} {missing}")
        name: str = getattr(function, "__qualname__", type(function).__qualname__)
        if name in self._finding_hooks:
            raise RegistrationError(f"two functions of on_finding are named {name!r}: rename one, the name is stored")
        self._finding_hooks[name] = function
        return function

    @abstractmethod
    def _refuse_while_running(self) -> None: ...
