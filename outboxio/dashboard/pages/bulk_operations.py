"""Retry and skip notifications: one, several, or all that match a filter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.confirming import (
    Confirmation,
    back_of,
    confirm,
    has_background_process,
    is_sure,
    reason_of,
    wrong_text,
)
from outboxio.dashboard.filters import (
    PARAMETERS,
    Fields,
    describe_filter,
    filter_of,
    refuse_payload_parameters,
    refuse_unknown_parameters,
)
from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.view import Done, Refused, View
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import Operation
from outboxio.operations.arguments import ids_argument
from outboxio.operations.queries.filters import TO_RETRY, TO_SKIP, frozen, query_of

COUNT_TIMEOUT = 5.0  # seconds
MAX_WITHOUT_PROCESS = 1_000
"""Notifications that are changed within the request if no process runs in the background."""
COUNTED = "counted"
"""The hidden field with the time of the count: notifications that have changed since are not changed."""
_FORM = ("csrf", "back", "sure", "reason", "typed", "id", "shard", COUNTED)
_TICK = timedelta(microseconds=1)

Kind = Literal["retry", "skip"]


class _Plan(Struct, frozen=True, kw_only=True):
    """What an operation would change."""

    kind: Kind
    chosen: tuple[UUID, ...] | Filter
    reached: tuple[UUID, ...] | Filter
    """The same, without what has changed since the count."""
    shard: str | None
    planned: Operation
    counted: datetime

    @property
    def number(self) -> str:
        return f"{self.planned.matched:,}{'' if self.planned.is_complete else '+'}"

    @property
    def is_all(self) -> bool:
        """True for a filter, and False for single notifications."""
        return isinstance(self.chosen, Filter)


async def retry(request: PageRequest, form: Fields) -> Done | View:
    """Retry notifications: a single one immediately, several after a confirmation."""
    return await _change("retry", request, form)


async def skip(request: PageRequest, form: Fields) -> Done | View:
    """Skip notifications, after a confirmation."""
    return await _change("skip", request, form)


async def _change(kind: Kind, request: PageRequest, form: Fields) -> Done | View:
    chosen, shard = await _chosen(kind, request, form)
    if not is_sure(form) and kind == "retry" and isinstance(chosen, tuple) and len(chosen) == 1:
        operation = await _operate(kind, request)(chosen, reason=reason_of(form), shard=shard)
        return Done(operation=operation.id)
    counted = _counted(form)
    reached = chosen if counted is None or isinstance(chosen, tuple) else frozen(chosen, counted)
    works = await has_background_process(request)
    planned = await _planned(kind, request, reached, shard)
    plan = _Plan(
        kind=kind, chosen=chosen, reached=reached, shard=shard, planned=planned,
        counted=counted or planned.created_date + _TICK,
    )  # fmt: skip
    wrong = wrong_text(form, _typed(plan)) if is_sure(form) else None
    if not is_sure(form) or wrong or not planned.matched:
        return confirm(_confirmation(plan, form, wrong, works=works))
    return await _carry_out(plan, request, form, works=works)


async def _planned(kind: Kind, request: PageRequest, chosen: tuple[UUID, ...] | Filter, shard: str | None) -> Operation:
    """Count what the operation would change, up to 100,000; up to the bound of lists if that takes too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(COUNT_TIMEOUT):
            return await _operate(kind, request)(chosen, dry_run=True, shard=shard)
    if isinstance(chosen, tuple):
        raise Refused(504, "The database did not respond within 5 s.", "The page Shards shows how fast it is.")
    count = await request.admin.count(chosen, shard=shard)
    nothing = await _operate(kind, request)((), dry_run=True, shard=shard)  # for its date; runs no query
    return replace(nothing, matched=int(count), is_complete=count.is_complete)


async def _carry_out(plan: _Plan, request: PageRequest, form: Fields, *, works: bool) -> Done:
    operate, reason = _operate(plan.kind, request), reason_of(form)
    if not plan.is_all:
        return Done(operation=(await operate(plan.reached, reason=reason, shard=plan.shard)).id)
    in_background = works or plan.planned.matched > MAX_WITHOUT_PROCESS
    operation = await operate(plan.reached, reason=reason, shard=plan.shard, background=in_background)
    location = request.path_of("operation", id=operation.id, of=plan.planned.matched)
    return Done(location=location)


def _operate(kind: Kind, request: PageRequest) -> Callable[..., Awaitable[Operation]]:
    return request.admin.retry if kind == "retry" else request.admin.skip


async def _chosen(kind: Kind, request: PageRequest, form: Fields) -> tuple[tuple[UUID, ...] | Filter, str | None]:
    """Return the ids or the filter of the form, and the shard."""
    refuse_unknown_parameters(form, [*PARAMETERS, *_FORM])
    refuse_payload_parameters(form, request.access)
    shard = form.get("shard")
    if shard is not None and shard not in request.shards:
        raise Refused(400, f"There is no shard {shard[:40]!r}.", f"The shards are: {', '.join(request.shards)}.")
    parameters = [name for name in PARAMETERS if name in form]
    if ids := form.all("id"):
        if parameters:
            raise Refused(400, "The form has both ids and a filter.", "Choose either single notifications or a filter.")
        return tuple(dict.fromkeys(ids_argument(ids, kind))), shard
    if not parameters:
        raise Refused(
            400, "No notification is selected.", "Select at least one row, or use a button for all that match."
        )
    states = TO_RETRY if kind == "retry" else TO_SKIP
    now = (await request.admin.overview()).read_date
    filter = filter_of(form.all, now=now)
    possible = tuple(state for state in filter.states if state in states)
    if filter.states and not possible:
        effects = ", ".join(map(str, filter.states))
        raise Refused(
            400, f"A notification in the state {effects} cannot be changed by {kind}.",
            f"{kind.capitalize()} changes notifications that are {', '.join(map(str, states))}.",
        )  # fmt: skip
    return replace(filter, states=possible or states), shard


def _counted(form: Fields) -> datetime | None:
    """Return the time of the count on the confirmation page."""
    text = form.get(COUNTED)
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise Refused(400, f"{COUNTED} is not a date: {text[:40]!r}.", "Start the operation from its page.") from None


# --- in parameters ------------------------------------------------------------------------------------


def _confirmation(plan: _Plan, form: Fields, wrong: str | None, *, works: bool) -> Confirmation:
    verb = plan.kind.capitalize()
    things = "notification" if plan.planned.matched == 1 and plan.planned.is_complete else "notifications"
    has_any = plan.planned.matched > 0
    return Confirmation(
        operation=plan.kind,
        question=f"{verb} {plan.number} {things}?" if has_any else f"There is nothing to {plan.kind}",
        effects=_effects(plan, works=works) if has_any else [f"No notification matches any more: {_subject(plan)}."],
        button=f"{verb} {plan.number} {things}" if has_any else "",
        fields=_fields(plan),
        typed=_typed(plan),
        reason=form.get("reason", ""),
        wrong=wrong,
        back=back_of(form),
    )


def _effects(plan: _Plan, *, works: bool) -> list[str]:
    effects = [f"{_subject(plan)[:1].upper()}{_subject(plan)[1:]}."]
    if plan.kind == "retry":
        effects.append("They become due now, with all attempts available again.")
    else:
        effects.append("They become SKIPPED: their handlers will never handle these events. Parked keys resume.")
    if plan.planned.refused:
        effects.append(f"{plan.planned.refused:,} of them cannot be changed, because they have finished since.")
    if not plan.is_all:
        return effects
    if not plan.planned.is_complete:
        effects.append("The operation changes all that match, including those that were not counted.")
    if works:
        effects.append("The operation runs in the background, in chunks of 1,000, and can be stopped.")
    elif plan.planned.matched <= MAX_WITHOUT_PROCESS:
        effects.append("No process of the outbox is running, so this page runs the operation while you wait.")
    else:
        effects.append(
            "No process of the outbox is running, and this page itself changes at most "
            f"{MAX_WITHOUT_PROCESS:,} notifications. The operation starts when a process starts."
        )
    return effects


def _subject(plan: _Plan) -> str:
    if isinstance(plan.chosen, Filter):
        return describe_filter(plan.chosen)
    return "the selected notification" if len(plan.chosen) == 1 else f"the {len(plan.chosen):,} selected notifications"


def _typed(plan: _Plan) -> str | None:
    """Return the number that has to be typed: skipping everything that matches cannot be undone."""
    return f"{plan.planned.matched:,}" if plan.kind == "skip" and plan.is_all and plan.planned.matched else None


def _fields(plan: _Plan) -> list[tuple[str, str]]:
    shard = [] if plan.shard is None else [("shard", plan.shard)]
    if isinstance(plan.chosen, Filter):
        parameters = query_of(plan.chosen)
        counted = (COUNTED, plan.counted.isoformat())
        return [*((name, value) for name, values in parameters.items() for value in values), *shard, counted]
    return [*(("id", str(id)) for id in plan.chosen), *shard]
