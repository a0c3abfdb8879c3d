"""The timeline of an event: emitted, fanned out, each attempt of each handler, and the events that it caused.

The tables store when an attempt ended, and how long a failed attempt ran. Other steps show the time since the previous
one, which includes both wait and run. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import cast
from uuid import UUID

from markupsafe import Markup, escape
from msgspec import Struct

from outboxio.dashboard.showing.documents import Delivery
from outboxio.dashboard.showing.shown import MARKS, duration
from outboxio.model.notification import State
from outboxio.model.operating.operation import StoredEvent

_SAME = timedelta(seconds=1)
"""Notifications created within this time belong to one round of fan-out."""
_ENDS = {State.DEAD, State.EXPIRED, State.SUCCEEDED, State.SKIPPED}


class Step(Struct, frozen=True, kw_only=True):
    """A step of the timeline."""

    time: datetime | None
    """``None`` for attempts whose errors are no longer kept."""
    after: float | None
    """Seconds since the event was emitted."""
    what: str
    detail: str = ""
    look: str = "wait"
    handler: str | None = None
    event_id: UUID | None = None
    """A caused event."""
    is_ahead: bool = False
    """True for a planned step."""


class Caused(Struct, frozen=True, kw_only=True):
    """An event caused by this one."""

    event_id: UUID
    event_type: str | None
    action_name: str
    event_date: datetime


def steps_of(event: StoredEvent, deliveries: Sequence[Delivery], caused: Iterable[Caused], now: datetime) -> list[Step]:
    """Return the steps in chronological order; planned steps come last."""
    start = event.event_date
    steps = [Step(time=start, after=0.0, what="emitted", detail=f"by {event.action_name}", look="good")]
    if event.available_at is not None:
        steps.append(_step(start, event.available_at, "available", ahead=event.available_at > now))
    steps += _fanned_out(start, deliveries)
    for delivery in deliveries:
        steps += _runs(start, delivery)
    steps += [
        _step(start, one.event_date, f"caused {one.event_type or 'no event'}", f"by {one.action_name}", "good",
              event_id=one.event_id)
        for one in caused
    ]  # fmt: skip
    return sorted(steps, key=lambda step: (step.is_ahead, step.time or start))


def _step(
    start: datetime, time: datetime, what: str, detail: str = "", look: str = "wait", *, handler: str | None = None,
    event_id: UUID | None = None, ahead: bool = False,
) -> Step:  # fmt: skip
    after = max(0.0, (time - start).total_seconds())
    return Step(time=time, after=after, what=what, detail=detail, look=look, handler=handler, event_id=event_id,
                is_ahead=ahead)  # fmt: skip


def _fanned_out(start: datetime, deliveries: Sequence[Delivery]) -> list[Step]:
    """Return a step for each round of fan-out. A handler added later got the event from a backfill."""
    rounds: list[list[Delivery]] = []
    for delivery in sorted(deliveries, key=lambda one: one.created_date):
        if rounds and delivery.created_date - rounds[-1][0].created_date < _SAME:
            rounds[-1].append(delivery)
        else:
            rounds.append([delivery])
    return [
        _step(start, members[0].created_date, "fanned out" if members is rounds[0] else "added later",
              f"to {members[0].handler_name}" if len(members) == 1 else f"to {len(members)} handlers", "good")
        for members in rounds
    ]  # fmt: skip


def _runs(start: datetime, one: Delivery) -> list[Step]:
    """Return the attempts of a handler, the end, and what is planned."""
    name, last, since = one.handler_name, one.created_date, "fan-out"
    steps: list[Step] = []
    errors = one.errors[::-1]  # the oldest first
    first = errors[0]["attempt"] if errors else None
    if isinstance(first, int) and first > 1:
        steps.append(Step(
            time=None, after=None, what=f"{first - 1} earlier attempt{'' if first == 2 else 's'}", handler=name,
            detail="times not kept: a notification keeps its newest errors", look="off",
        ))  # fmt: skip
        since = ""
    for error in errors:
        time, attempt = error["time"], error["attempt"]
        if not isinstance(time, datetime):
            continue
        ends = error is errors[-1] and one.state in (State.DEAD, State.EXPIRED) and attempt == one.attempts
        text = f"attempt {attempt} failed" if attempt is not None else "failed"
        steps.append(_step(
            start, time, f"{text}, {one.state}" if ends else text,
            _detail(str(error["type"]), last, time, since, cast("float | None", error["ran"])),
            "bad" if ends else "warn", handler=name,
        ))  # fmt: skip
        last, since = time, "the previous attempt"
        if ends:
            return steps
    if one.state in _ENDS:
        what = {State.SUCCEEDED: f"attempt {one.attempts} succeeded", State.SKIPPED: "skipped"}.get(
            one.state, str(one.state)
        )
        detail = _detail("", last, one.updated_date, since)
        steps.append(_step(start, one.updated_date, what, detail, MARKS[one.state], handler=name))
    elif one.due is not None:
        steps.append(_step(start, one.due, "next run", "overdue" if one.is_overdue else "", handler=name, ahead=True))
    return steps


def _detail(text: str, before: datetime, time: datetime, since: str, ran: float | None = None) -> str:
    """Describe the wait and the run, or the time since the previous step."""
    together = max(0.0, (time - before).total_seconds())
    if ran is None:
        parts = [text, f"{duration(together)} after {since}" if since else ""]
    else:
        waited = f"waited {duration(max(0.0, together - ran))} after {since}" if since else ""
        parts = [text, waited, f"ran {'less than 1 ms' if ran < 0.001 else duration(ran)}"]
    return ", ".join(part for part in parts if part)


# --- the timeline as an image ------------------------------------------------------------------------

WIDTH, HEIGHT, MARK = 1000, 14, 8


class Lane(Struct, frozen=True):
    """The line of a handler. It is hidden from screen readers, because the list of steps has the same content."""

    handler: str
    picture: Markup


def lanes_of(steps: Sequence[Step], deliveries: Sequence[Delivery]) -> list[Lane]:
    """Return a lane for each handler, from fan-out to its last step, all with the same scale."""
    known = [step for step in steps if step.after is not None and not step.is_ahead]
    longest = max((step.after or 0.0 for step in known), default=0.0)
    if not longest:
        return []
    start = steps[0].time or deliveries[0].created_date
    lanes: list[Lane] = []
    for delivery in deliveries:
        own = [step for step in known if step.handler == delivery.handler_name]
        begin = max(0.0, (delivery.created_date - start).total_seconds())
        end = longest if delivery.state not in _ENDS else max([begin, *(step.after or 0.0 for step in own)])
        parts = [_rect("lane-wait", begin / longest, end / longest)]
        parts += [_mark(step.look, (step.after or 0.0) / longest) for step in own]
        lanes.append(Lane(delivery.handler_name, _drawn(parts)))
    return lanes


def _rect(name: str, begin: float, end: float) -> str:
    width = WIDTH - MARK
    return f'<rect class="{name}" x="{begin * width:.1f}" y="5" width="{(end - begin) * width + MARK:.1f}" height="4"/>'


def _mark(look: str, at: float) -> str:
    return f'<rect class="lane-{escape(look)}" x="{at * (WIDTH - MARK):.1f}" y="0" width="{MARK}" height="{HEIGHT}"/>'


def _drawn(parts: Iterable[str]) -> Markup:
    return Markup(
        f'<svg class="lane" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(parts)}</svg>"
    )
