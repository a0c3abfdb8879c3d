"""The databases of the outbox."""

from __future__ import annotations

from datetime import timedelta

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS
from outboxio.dashboard.pages.handlers import links_of, overview_for
from outboxio.dashboard.view import View
from outboxio.model.operating.operation import Operation
from outboxio.operations.overview.values import Finding, ShardStatus
from outboxio.support.duration import format_duration

_RULES = ("shard_unreachable", "schema_behind", "fanout_behind", "event_without_handler", "clock_off", "unroutable")
_LOOKED_AT = 100


class Kept(Struct, frozen=True, kw_only=True):
    """For how long rows are kept."""

    keep_finished: str
    keep_dead: str


class ShardsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    shards: tuple[ShardStatus, ...]
    findings: tuple[Finding, ...]
    kept: Kept
    last_purge: Operation | None
    """The newest purge by hand, among the newest 100 orders."""


async def shards(asked: Asked) -> View:
    """Each database: reachable or not, tables, fan-out, clock."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    overview, settings = await overview_for(asked), asked.outbox.settings
    is_up = any(shard.is_reachable and shard.schema is None for shard in overview.shards)
    orders: list[Operation] = await asked.admin.operations(_LOOKED_AT) if is_up and len(overview.shards) == 1 else []
    facts = ShardsFacts(
        shards=overview.shards,
        findings=tuple(finding for finding in overview.findings if finding.rule in _RULES),
        kept=Kept(keep_finished=_kept(settings.keep_finished), keep_dead=_kept(settings.keep_dead)),
        last_purge=next((one for one in orders if one.kind == "purge"), None),
    )
    return View(template="shards.html", title="Shards", facts=facts, shown={"links": links_of(facts.findings, asked)})


def _kept(time: timedelta) -> str:
    return f"{time.days} days" if time.days > 1 and not time.seconds else format_duration(time)
