"""The figures and the verdict of ``outbox.admin.overview()``, for ``outbox.health()``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from outboxio.health.figures import Figures, Told
from outboxio.operations.overview.values import Overview

_TOLD_BY_HEALTH = {"shard_unreachable", "schema_behind"}


class OverviewSource:
    """Reads the overview. What health itself says of shards is left out."""

    def __init__(self, read: Callable[[], Awaitable[Overview]]) -> None:
        self._read = read

    async def figures(self) -> Figures:
        """See :class:`~outboxio.health.figures.FigureSource`."""
        overview = await self._read()
        return Figures(
            findings=[
                Told(rule=finding.rule, level=finding.level, text=finding.sentence)
                for finding in overview.findings
                if finding.rule not in _TOLD_BY_HEALTH
            ],
            lag=overview.figures.oldest_undelivered,
            oldest_due={one.handler_name: one.oldest_due for one in overview.handlers if one.oldest_due is not None},
            unroutable=overview.figures.unroutable,
            missing=next((f"{error} (shard {one.shard!r})" for one in overview.shards if (error := one.error)), None),
        )
