"""The orders about notifications: retry and skip, for one, for several, or for everything that a filter selects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.confirming import (
    Confirmation,
    back_of,
    confirm,
    is_sure,
    reason_of,
    someone_works,
    wrong_text,
)
from outboxio.dashboard.filters import (
    WORDS,
    Fields,
    filter_of,
    in_words,
    refuse_hidden_words,
    refuse_unknown_words,
)
from outboxio.dashboard.view import Done, Refused, View
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import Operation
from outboxio.operations.arguments import given_ids
from outboxio.operations.queries.filters import TO_RETRY, TO_SKIP, frozen, query_of

LONGEST_COUNT = 5.0  # seconds
MOST_AT_ONCE = 1_000
"""Notifications that are changed within the request, if no process works in the background."""
COUNTED = "counted"
"""The hidden field with the moment at which the page has counted: what changes later is left alone."""
_FORM = ("csrf", "back", "sure", "reason", "typed", "id", "shard", COUNTED)
_TICK = timedelta(microseconds=1)

Kind = Literal["retry", "skip"]


class _Plan(Struct, frozen=True, kw_only=True):
    """What an order would reach."""

    kind: Kind
    chosen: tuple[UUID, ...] | Filter
    reached: tuple[UUID, ...] | Filter
    """The same, without what has changed since the page has counted."""
    shard: str | None
    planned: Operation
    counted: datetime

    @property
    def number(self) -> str:
        return f"{self.planned.matched:,}{'' if self.planned.is_complete else '+'}"

    @property
    def is_all(self) -> bool:
        """True if the order is for a filter, and not for single notifications."""
        return isinstance(self.chosen, Filter)


async def retry(asked: Asked, form: Fields) -> Done | View:
    """Retry notifications. A single notification is retried at once, everything else after a confirmation."""
    return await _change("retry", asked, form)


async def skip(asked: Asked, form: Fields) -> Done | View:
    """Skip notifications, after a confirmation."""
    return await _change("skip", asked, form)


async def _change(kind: Kind, asked: Asked, form: Fields) -> Done | View:
    chosen, shard = await _chosen(kind, asked, form)
    if not is_sure(form) and kind == "retry" and isinstance(chosen, tuple) and len(chosen) == 1:
        operation = await _order(kind, asked)(chosen, reason=reason_of(form), shard=shard)
        return Done(operation=operation.id)
    counted = _counted(form)
    reached = chosen if counted is None or isinstance(chosen, tuple) else frozen(chosen, counted)
    works = await someone_works(asked)
    planned = await _planned(kind, asked, reached, shard)
    plan = _Plan(
        kind=kind, chosen=chosen, reached=reached, shard=shard, planned=planned,
        counted=counted or planned.created_date + _TICK,
    )  # fmt: skip
    wrong = wrong_text(form, _typed(plan)) if is_sure(form) else None
    if not is_sure(form) or wrong or not planned.matched:
        return confirm(_confirmation(plan, form, wrong, works=works))
    return await _carry_out(plan, asked, form, works=works)


async def _planned(kind: Kind, asked: Asked, chosen: tuple[UUID, ...] | Filter, shard: str | None) -> Operation:
    """What the order would reach: counted up to 100,000, or as far as a page of a list counts if that takes long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_COUNT):
            return await _order(kind, asked)(chosen, dry_run=True, shard=shard)
    if isinstance(chosen, tuple):
        raise Refused(504, "The database has not answered within 5 s.", "The page Shards shows how fast it is.")
    count = await asked.admin.count(chosen, shard=shard)
    nothing = await _order(kind, asked)((), dry_run=True, shard=shard)  # for its date, and without a question
    return replace(nothing, matched=int(count), is_complete=count.is_complete)


async def _carry_out(plan: _Plan, asked: Asked, form: Fields, *, works: bool) -> Done:
    order, reason = _order(plan.kind, asked), reason_of(form)
    if not plan.is_all:
        return Done(operation=(await order(plan.reached, reason=reason, shard=plan.shard)).id)
    in_background = works or plan.planned.matched > MOST_AT_ONCE
    operation = await order(plan.reached, reason=reason, shard=plan.shard, background=in_background)
    location = asked.path_of("operation", id=operation.id, of=plan.planned.matched)
    return Done(location=location)


def _order(kind: Kind, asked: Asked) -> Callable[..., Awaitable[Operation]]:
    return asked.admin.retry if kind == "retry" else asked.admin.skip


async def _chosen(kind: Kind, asked: Asked, form: Fields) -> tuple[tuple[UUID, ...] | Filter, str | None]:
    """The ids of the form, or else its filter, and the shard."""
    refuse_unknown_words(form, [*WORDS, *_FORM])
    refuse_hidden_words(form, asked.access)
    shard = form.get("shard")
    if shard is not None and shard not in asked.shards:
        raise Refused(400, f"There is no shard {shard[:40]!r}.", f"The shards are: {', '.join(asked.shards)}.")
    words = [word for word in WORDS if word in form]
    if ids := form.all("id"):
        if words:
            raise Refused(400, "The form has ids and a filter.", "Choose either single notifications, or a filter.")
        return tuple(dict.fromkeys(given_ids(ids, kind))), shard
    if not words:
        raise Refused(400, "No notification is selected.", "Tick at least one row, or use a button for all that match.")
    states = TO_RETRY if kind == "retry" else TO_SKIP
    now = (await asked.admin.overview()).read_date
    filter = filter_of(form.all, now=now)
    possible = tuple(state for state in filter.states if state in states)
    if filter.states and not possible:
        told = ", ".join(map(str, filter.states))
        raise Refused(
            400, f"A notification in the state {told} cannot be changed by {kind}.",
            f"{kind.capitalize()} changes notifications that are {', '.join(map(str, states))}.",
        )  # fmt: skip
    return replace(filter, states=possible or states), shard


def _counted(form: Fields) -> datetime | None:
    """The moment at which the page of the first step has counted."""
    text = form.get(COUNTED)
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise Refused(400, f"{COUNTED} is {text[:40]!r}, and not a date.", "Give the order from its page.") from None


# --- in words ------------------------------------------------------------------------------------


def _confirmation(plan: _Plan, form: Fields, wrong: str | None, *, works: bool) -> Confirmation:
    verb = plan.kind.capitalize()
    things = "notification" if plan.planned.matched == 1 and plan.planned.is_complete else "notifications"
    has_any = plan.planned.matched > 0
    return Confirmation(
        order=plan.kind,
        question=f"{verb} {plan.number} {things}?" if has_any else f"There is nothing to {plan.kind}",
        told=_told(plan, works=works) if has_any else [f"No notification matches any longer: {_words(plan)}."],
        button=f"{verb} {plan.number} {things}" if has_any else "",
        fields=_fields(plan),
        typed=_typed(plan),
        reason=form.get("reason", ""),
        wrong=wrong,
        back=back_of(form),
    )


def _told(plan: _Plan, *, works: bool) -> list[str]:
    told = [f"{_words(plan)[:1].upper()}{_words(plan)[1:]}."]
    if plan.kind == "retry":
        told.append("They become due now, with all attempts before them.")
    else:
        told.append("They end SKIPPED: their handlers never handle these events. Parked keys go on behind them.")
    if plan.planned.refused:
        told.append(f"{plan.planned.refused:,} of them cannot be changed, because they have ended in the meantime.")
    if not plan.is_all:
        return told
    if not plan.planned.is_complete:
        told.append("The order reaches all that match, also those that were not counted.")
    if works:
        told.append("The order runs in the background, in pieces of 1,000, and can be stopped.")
    elif plan.planned.matched <= MOST_AT_ONCE:
        told.append("No process of the outbox runs, so this page carries the order out, and you wait for the end.")
    else:
        told.append(
            f"No process of the outbox runs, and this page itself changes at most {MOST_AT_ONCE:,} notifications. "
            "The order is kept, and begins when a process starts."
        )
    return told


def _words(plan: _Plan) -> str:
    if isinstance(plan.chosen, Filter):
        return in_words(plan.chosen)
    return "the selected notification" if len(plan.chosen) == 1 else f"the {len(plan.chosen):,} selected notifications"


def _typed(plan: _Plan) -> str | None:
    """The number that has to be typed: to skip everything that matches cannot be taken back."""
    return f"{plan.planned.matched:,}" if plan.kind == "skip" and plan.is_all and plan.planned.matched else None


def _fields(plan: _Plan) -> list[tuple[str, str]]:
    shard = [] if plan.shard is None else [("shard", plan.shard)]
    if isinstance(plan.chosen, Filter):
        words = query_of(plan.chosen)
        counted = (COUNTED, plan.counted.isoformat())
        return [*((name, value) for name, values in words.items() for value in values), *shard, counted]
    return [*(("id", str(id)) for id in plan.chosen), *shard]
