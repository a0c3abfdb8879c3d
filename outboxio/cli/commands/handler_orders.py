"""The orders about a handler: ``outboxio resume``, ``replay``, ``backfill``, ``pause``, ``unpause``, ``unsubscribe``.

A dry run checks the same words as the order, says what the order would do, and changes and records nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from outboxio.cli.answer import Exit
from outboxio.cli.asking import ask
from outboxio.cli.commands.manner import Manner
from outboxio.cli.inside import admin_of, refuse_unknown_handler
from outboxio.cli.shown import counted, moment
from outboxio.model.operating.filter import Filter
from outboxio.outbox import Outbox

_UNFINISHED = ("PENDING", "FAILED", "BLOCKED", "DYING")


async def resume(outbox: Outbox, handler: str, key: str, manner: Manner) -> Exit:
    """Skip the dead letters that park a key."""
    admin = admin_of(outbox)
    dead = await admin.count(Filter(states=("DEAD", "EXPIRED"), handler=handler, ordering_key=key))
    behind = await admin.count(Filter(states=("BLOCKED",), handler=handler, ordering_key=key))
    dead_letters, others = counted(dead, "dead letter"), counted(behind, "notification")
    does = f"skip {dead_letters} of key {key} of {handler}, and let {others} go on"
    if not dead:
        return manner.said(f"key {key} of {handler} is not parked; outboxio keys shows the parked keys", Exit.NO)
    if manner.dry_run:
        return manner.said(f"resume would {does}")
    if not ask(f"{does}?", yes=manner.yes):
        return Exit.NO
    return manner.counted(
        await admin.resume(handler, key, reason=manner.reason), "resumed: {} notifications were skipped"
    )


async def replay(outbox: Outbox, handler: str, since: datetime, until: datetime | None, manner: Manner) -> Exit:
    """Run a handler again for finished events."""
    span = f"since {moment(since)} UTC" + (f" and before {moment(until)} UTC" if until is not None else "")
    does = f"run {handler} again for all events {span} that {handler} has finished"
    if manner.dry_run:
        await refuse_unknown_handler(outbox, handler, among_rows=True)
        return manner.said(f"replay would {does}")
    if not ask(f"{does}?", yes=manner.yes):
        return Exit.NO
    done = await admin_of(outbox).replay(handler, since, until, reason=manner.reason)
    return manner.counted(done, "replayed: {} events are due again")


async def backfill(outbox: Outbox, handler: str, since: datetime, types: Sequence[str], manner: Manner) -> Exit:
    """Give a handler the events that were fanned out without the handler."""
    what = f"all {', '.join(types)} events" if types else "all events"
    does = f"give {handler} {what} since {moment(since)} UTC that {handler} has missed"
    if manner.dry_run:
        await refuse_unknown_handler(outbox, handler, types=types)
        return manner.said(f"backfill would {does}")
    if not ask(f"{does}?", yes=manner.yes):
        return Exit.NO
    done = await admin_of(outbox).backfill(handler, since, types or None, reason=manner.reason)
    return manner.counted(done, "backfilled: {} notifications are new")


async def pause(outbox: Outbox, handler: str, manner: Manner) -> Exit:
    """Start no run of a handler."""
    admin = admin_of(outbox)
    if manner.dry_run:
        await refuse_unknown_handler(outbox, handler)
        if handler in await admin.paused():
            return manner.said(f"{handler} is paused already")
        return manner.said(f"pause would start no further run of {handler}, in any process")
    await admin.pause(handler, reason=manner.reason)
    return manner.said(f"{handler} is paused: no run starts, in any process; outboxio unpause ends the pause")


async def unpause(outbox: Outbox, handler: str, manner: Manner) -> Exit:
    """End the pause of a handler."""
    admin = admin_of(outbox)
    if manner.dry_run:
        await refuse_unknown_handler(outbox, handler)
        if handler in await admin.paused():
            return manner.said(f"unpause would let {handler} run again")
    elif await admin.unpause(handler, reason=manner.reason):
        return manner.said(f"{handler} runs again")
    return manner.said(f"{handler} was not paused", Exit.NO)


async def unsubscribe(outbox: Outbox, handler: str, manner: Manner) -> Exit:
    """Forget a handler that is gone for good. The name has to be typed."""
    admin = admin_of(outbox)
    await refuse_unknown_handler(outbox, handler)
    waiting = await admin.count(Filter(states=_UNFINISHED, handler=handler))
    does = f"keep no more events for {handler}, and {counted(waiting, 'waiting notification')} would expire"
    if manner.dry_run:
        return manner.said(f"unsubscribe would {does}")
    question = f"no more events are kept for {handler}, and {counted(waiting, 'waiting notification')} will expire."
    if not ask(question, yes=manner.yes, typed=handler):
        return Exit.NO
    number = await admin.unsubscribe(handler, reason=manner.reason)
    return manner.counted(number, "unsubscribed: {} subscriptions are gone")
