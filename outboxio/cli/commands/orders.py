"""The orders of an operator: ``outboxio retry``, ``skip``, ``resume``, ``replay``, ``pause`` and so on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.cli.answer import Exit, line, say, say_error, say_json
from outboxio.cli.asking import ask, progress
from outboxio.cli.choice import Choice
from outboxio.cli.inside import admin_of, types_of
from outboxio.cli.target import TargetError
from outboxio.model.event import is_event_class
from outboxio.model.operating.filter import Filter
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.operations.admin import Admin
from outboxio.outbox import Outbox

MOST_WITHOUT_ALL = 10_000  # notifications that an order changes without --all


class Manner(Struct, frozen=True):
    """How an order is given."""

    yes: bool = False
    dry_run: bool = False
    reason: str | None = None
    as_json: bool = False


class Given(Struct, frozen=True):
    """The notifications of an order: ids, or a filter."""

    ids: Sequence[UUID]
    choice: Choice
    all: bool
    background: bool = False

    def chosen(self, order: str) -> Sequence[UUID] | Filter:
        """The ids, or the filter. Refuses both, and an order for everything without ``--all``."""
        if self.ids and (self.all or not self.choice.is_empty):
            raise TargetError("ids and options that choose notifications exclude each other; give one of the two")
        if self.ids:
            return self.ids
        if self.choice.is_empty and not self.all:
            raise TargetError(f"{order} needs ids, options that choose notifications, or --all")
        return self.choice.filter()


async def change(outbox: Outbox, kind: str, given: Given, manner: Manner) -> Exit:
    """Retry or skip notifications: first the number, then the question, then the order with its progress."""
    admin = admin_of(outbox)
    order: Callable[..., Awaitable[Operation]] = admin.retry if kind == "retry" else admin.skip
    chosen = given.chosen(kind)
    planned = await order(chosen, dry_run=True)
    number = f"{planned.matched:,}{'' if planned.is_complete else '+'} notifications"
    if manner.dry_run or not planned.matched:
        return _tell(planned, manner, f"{kind} would reach {number}")
    if planned.matched > MOST_WITHOUT_ALL and not given.all:
        raise TargetError(f"{number} match, and {kind} changes at most {MOST_WITHOUT_ALL:,} without --all: add --all")
    if not ask(f"{kind} {number}?", yes=manner.yes or bool(given.ids)):
        return Exit.NO
    if given.background:
        done = await order(chosen, reason=manner.reason, background=True)
        return _tell(done, manner, f"ordered: outboxio operations shows how far operation {done.id} is")
    with progress(kind) as report:

        def shown(now: Operation) -> None:
            report(now.done + now.refused, planned.matched)

        done = await order(chosen, reason=manner.reason, progress=shown)
    return _tell(done, manner, None)


async def resume(outbox: Outbox, handler: str, key: str, manner: Manner) -> Exit:
    return await _number(
        outbox, manner, f"skip the dead letters that park key {key} of {handler}, and let the key go on?",
        lambda admin: admin.resume(handler, key, reason=manner.reason), "resumed: {} notifications were skipped",
    )  # fmt: skip


async def replay(outbox: Outbox, handler: str, since: datetime, until: datetime | None, manner: Manner) -> Exit:
    return await _number(
        outbox, manner, f"run {handler} again for all events since {since:%Y-%m-%d %H:%M:%S} UTC that it has finished?",
        lambda admin: admin.replay(handler, since, until, reason=manner.reason), "replayed: {} events are due again",
    )  # fmt: skip


async def backfill(outbox: Outbox, handler: str, since: datetime, types: Sequence[str], manner: Manner) -> Exit:
    return await _number(
        outbox, manner, f"give {handler} all events since {since:%Y-%m-%d %H:%M:%S} UTC that it has missed?",
        lambda admin: admin.backfill(handler, since, types or None, reason=manner.reason),
        "backfilled: {} notifications are new",
    )  # fmt: skip


async def pause(outbox: Outbox, handler: str, manner: Manner) -> Exit:
    await admin_of(outbox).pause(handler, reason=manner.reason)
    return _said(manner, f"{handler} is paused: no run starts, in any process; outboxio unpause ends the pause")


async def unpause(outbox: Outbox, handler: str, manner: Manner) -> Exit:
    if await admin_of(outbox).unpause(handler, reason=manner.reason):
        return _said(manner, f"{handler} runs again")
    return _said(manner, f"{handler} was not paused", Exit.NO)


async def purge(outbox: Outbox, manner: Manner) -> Exit:
    """Remove old rows now, as retention does."""
    settings = outbox.settings
    kept = f"finished rows of the last {settings.keep_finished.days} days and dead letters of {settings.keep_dead.days}"
    if not ask(f"remove everything but {kept} days, and what is unfinished?", yes=manner.yes):
        return Exit.NO
    removed = await admin_of(outbox).purge(reason=manner.reason)
    numbers: dict[str, int] = msgspec.structs.asdict(removed)
    if manner.as_json:
        say_json(numbers)
        return Exit.FINE
    return _said(manner, f"removed {', '.join(f'{number:,} {name}' for name, number in numbers.items())}")


async def unsubscribe(outbox: Outbox, handler: str, manner: Manner) -> Exit:
    """Forget a handler that is gone for good. The name has to be typed."""
    question = f"Events will no longer be kept for {handler}, and its waiting notifications expire."
    if not ask(question, yes=manner.yes, typed=handler):
        return Exit.NO
    number = await admin_of(outbox).unsubscribe(handler, reason=manner.reason)
    return _answer_number(manner, number, "unsubscribed: {} subscriptions are gone")


async def stop(outbox: Outbox, id: UUID, manner: Manner) -> Exit:
    if await admin_of(outbox).stop(id, reason=manner.reason):
        return _said(manner, f"operation {id} stops after the piece that is under way")
    return _said(manner, f"operation {id} had ended, or is unknown", Exit.NO)


async def emit(outbox: Outbox, event_type: str, payload: str, action: str, manner: Manner) -> Exit:
    """Record one event by hand, checked by the class of the event."""
    cls = types_of(outbox).get(event_type)
    if cls is None or not is_event_class(cls):
        known = ", ".join(sorted(types_of(outbox))) or "none"
        raise TargetError(f"no event class of this outbox has the type {event_type!r}; its types: {known}")
    try:
        fields: Mapping[str, Any] = msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise TargetError(f"the event is {payload!r}; expected a JSON object ({error})") from error
    event = _made(outbox, cls, event_type, fields)
    if manner.dry_run:
        return _said(manner, f"{event_type} would be recorded")
    async with outbox.transaction(action, {"event_type": event_type}) as tx:
        tx.emit(event)
    return _said(manner, f"recorded {event_type}")


def _made(outbox: Outbox, cls: Any, event_type: str, fields: Mapping[str, Any]) -> Any:
    try:
        return msgspec.convert(fields, cls) if issubclass(cls, Struct) else cls(**fields)
    except Exception as error:
        raise TargetError(f"this is no {event_type}: {error}") from error


# --- in words ------------------------------------------------------------------------------------


async def _number(
    outbox: Outbox, manner: Manner, question: str, order: Callable[[Admin], Awaitable[int]], told: str
) -> Exit:
    """Ask, carry an order out that answers with a number, and print the number."""
    if manner.dry_run:
        return _said(manner, f"dry run: {question}")
    if not ask(question, yes=manner.yes):
        return Exit.NO
    return _answer_number(manner, await order(admin_of(outbox)), told)


def _answer_number(manner: Manner, number: int, told: str) -> Exit:
    if manner.as_json:
        say_json({"number": number})
    else:
        say(line(("ok", "green") if number else ("..", "yellow"), f"  {told.format(f'{number:,}')}"))
    return Exit.FINE if number else Exit.NO


def _said(manner: Manner, text: str, code: Exit = Exit.FINE) -> Exit:
    if manner.as_json:
        say_json({"ok": code is Exit.FINE, "message": text})
    else:
        say(line(("ok", "green") if code is Exit.FINE else ("..", "yellow"), f"  {text}"))
    return code


def _tell(operation: Operation, manner: Manner, text: str | None) -> Exit:
    if manner.as_json:
        say_json(operation)
    else:
        numbers = (
            f"{operation.kind}: {operation.done:,} of {operation.matched:,} changed, {operation.refused:,} refused"
        )
        say(line(f"  {text or numbers}"))
    if operation.error is not None:
        say_error(operation.error)
    if not operation.matched:
        return Exit.NO
    is_partial = not operation.is_dry_run and operation.has_ended and operation.done < operation.matched
    return (
        Exit.PARTLY if is_partial or operation.state in (OperationState.STOPPED, OperationState.FAILED) else Exit.FINE
    )
