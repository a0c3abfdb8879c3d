"""The orders about handlers, keys, operations and whole shards."""

from __future__ import annotations

from datetime import datetime

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.confirming import Input, reason_of
from outboxio.dashboard.fields import Fields
from outboxio.dashboard.ordering import WrongValue, after, carried_out, confirmation_of, given, with_inputs
from outboxio.dashboard.view import Done, Refused, View
from outboxio.operations.asking.moments import EXPECTED_MOMENT, parse_moment


async def pause(asked: Asked, form: Fields) -> Done | View:
    """Pause a handler."""
    name = given(form, "handler")
    confirmation = confirmation_of("pause", form, f"Pause {name}?", [
        "No run of the handler starts, in any process, until an operator unpauses the handler.",
        "Runs under way go on. Events wait, and their retention begins when the pause ends.",
    ], f"Pause {name}", handler=name)  # fmt: skip
    return await after(confirmation, asked, form, lambda reason: asked.admin.pause(name, reason=reason))


async def unpause(asked: Asked, form: Fields) -> Done | View:
    """End the pause of a handler, at once."""
    name = given(form, "handler")
    return await carried_out("unpause", asked, form, lambda reason: asked.admin.unpause(name, reason=reason))


async def resume(asked: Asked, form: Fields) -> Done | View:
    """Let a parked key go on without the notification that parks the key."""
    name, key = given(form, "handler"), given(form, "key")
    confirmation = confirmation_of("resume", form, f"Resume the key {key} of {name} without its dead letter?", [
        "The dead letters that park the key end SKIPPED: the handler never handles these events.",
        "What is blocked behind them runs. If the dead letter should run again instead, retry the dead letter.",
    ], "Resume the key", handler=name, key=key)  # fmt: skip
    return await after(confirmation, asked, form, lambda reason: asked.admin.resume(name, key, reason=reason))


async def replay(asked: Asked, form: Fields) -> Done | View:
    """Make a handler run again for events that it has finished."""
    name = given(form, "handler")
    since, until = form.get("since"), form.get("until")
    confirmation = confirmation_of("replay", form, f"Run {name} again for events that it has finished?", [
        "SUCCEEDED, EXPIRED and DEAD notifications of the handler become due again, if their events were emitted in "
        "this time. The handler must be able to see an event twice.",
        "Notifications that retention has removed cannot be replayed.",
    ], f"Replay {name}", handler=name)  # fmt: skip
    confirmation = with_inputs(confirmation, [
        Input(name="since", label="Events emitted since (UTC)", hint="2h, 3d, 2026-01-31T02:41", value=since or ""),
        Input(name="until", label="and before (UTC)", hint="now", value=until or ""),
    ])  # fmt: skip

    async def carry_out(reason: str | None) -> object:
        begin, end = await _moment(asked, "since", since), await _moment(asked, "until", until)
        if begin is None:
            raise WrongValue(f"since is missing: expected {EXPECTED_MOMENT}.")
        return await asked.admin.replay(name, begin, end, reason=reason)

    return await after(confirmation, asked, form, carry_out)


async def backfill(asked: Asked, form: Fields) -> Done | View:
    """Give a handler events that were fanned out without the handler."""
    name, since = given(form, "handler"), form.get("since")
    confirmation = confirmation_of("backfill", form, f"Give {name} the events that it has missed?", [
        "The handler gets a notification for each event in this time that was fanned out without the handler.",
        "Notifications that exist already stay as they are.",
    ], f"Backfill {name}", handler=name)  # fmt: skip
    confirmation = with_inputs(confirmation, [
        Input(name="since", label="Events emitted since (UTC)", hint="2h, 3d, 2026-01-31T02:41", value=since or ""),
    ])  # fmt: skip

    async def carry_out(reason: str | None) -> object:
        begin = await _moment(asked, "since", since)
        if begin is None:
            raise WrongValue(f"since is missing: expected {EXPECTED_MOMENT}.")
        return await asked.admin.backfill(name, begin, reason=reason)

    return await after(confirmation, asked, form, carry_out)


async def unsubscribe(asked: Asked, form: Fields) -> Done | View:
    """Forget a handler that is gone for good."""
    name = given(form, "handler")
    confirmation = confirmation_of("unsubscribe", form, f"Remove the subscriptions of {name}?", [
        "For a handler that is gone for good: new events get no notification for the handler.",
        "A process that still has the handler announces the handler again within a minute.",
    ], f"Unsubscribe {name}", typed=name, handler=name)  # fmt: skip
    return await after(confirmation, asked, form, lambda reason: asked.admin.unsubscribe(name, reason=reason))


async def purge(asked: Asked, form: Fields) -> Done | View:
    """Remove old rows now."""
    settings, namespace = asked.outbox.settings, asked.outbox.namespace
    confirmation = confirmation_of("purge", form, f"Remove the old rows of {namespace} now?", [
        f"Finished notifications and events of more than {settings.keep_finished.days} days ago are removed, and dead "
        f"letters of more than {settings.keep_dead.days} days ago.",
        "Nothing that is unfinished is removed, and no dead letter that parks a key. Processes remove the same rows "
        "little by little.",
    ], "Purge", typed=namespace)  # fmt: skip
    return await after(confirmation, asked, form, lambda reason: asked.admin.purge(reason=reason))


async def stop(asked: Asked, form: Fields) -> Done | View:
    """Stop an operation under way, at once."""
    id = given(form, "id")
    stopped = await asked.admin.stop(id, reason=reason_of(form))
    if not stopped:
        raise Refused(409, "The operation has already ended.", "Notifications that were changed stay changed.")
    return Done()


# --- inside --------------------------------------------------------------------------------------


async def _moment(asked: Asked, name: str, text: str | None) -> datetime | None:
    """A moment of the form; a duration counts from the time of the database."""
    if text is None:
        return None
    moment = parse_moment(text, now=(await asked.admin.overview()).read_date)
    if moment is None:
        raise WrongValue(f"{name} is {text[:40]}: expected {EXPECTED_MOMENT}.")
    return moment
