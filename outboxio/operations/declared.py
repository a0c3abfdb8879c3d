"""The operations of an operator, each declared once: name, arguments, permission, question and effect.

The method of :class:`~outboxio.operations.admin.Admin` with the name of a declaration runs the operation and records
it. The command line and the dashboard are made from the declarations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import BoundedCount
from outboxio.support.duration import format_duration

if TYPE_CHECKING:
    from outboxio.operations.admin import Admin

# pyright: reportPrivateUsage=false

Values = Mapping[str, Any]
"""The arguments of a call, by name."""


class Preview(Struct, frozen=True):
    """What an operation would do if it ran now."""

    effect: Sequence[str] = ()
    """Sentences, with counts."""
    nothing: str | None = None
    """Why the operation would change nothing."""
    is_fulfilled: bool = False
    """True if nothing changes because the requested state already exists."""


Look = Callable[["Admin", Values], Awaitable[Preview]]


class Declared(Struct, frozen=True, kw_only=True):
    """An operation. Texts may name arguments, as in ``pause {handler}``."""

    kind: str
    """The name of the method, and of the operation in its record."""
    permission: str
    """The permission that a user of the dashboard needs."""
    arguments: Mapping[str, str] = {}
    """The required arguments, each with the name of its field in forms."""
    times: Sequence[str] = ()
    """The arguments that are times. ``since`` is required."""
    does: str
    """What the operation does, in the imperative: the question is this text with a question mark."""
    effect: Sequence[str] = ()
    """Sentences about the effect."""
    look: Look | None = None
    """Reads what the operation would do now."""
    confirm: Literal["never", "on pages", "always"] = "always"
    """Whether it is confirmed: on pages only, if it can be undone; or on the command line as well."""
    typed: str | None = None
    """The text to type for a confirmation, so that a single click does not remove much."""
    button: str = ""
    """The text of the dashboard's button."""
    done: str
    """The result. ``{number}`` is the number that the method returns."""
    unchanged: str = ""
    """The result if the method returns False or 0."""

    def text(self, template: str, admin: Admin, values: Values, **more: Any) -> str:
        """Fill in a text of the declaration with the arguments, the period, the event types and the retention."""
        return template.format_map({**_facts(values, admin), **more})

    async def preview(self, admin: Admin, values: Values) -> Preview:
        """Return what the operation would do now."""
        found = Preview() if self.look is None else await self.look(admin, values)
        known = _facts(values, admin)
        return replace(found, effect=[*found.effect, *(sentence.format_map(known) for sentence in self.effect)])

    async def run(self, admin: Admin, values: Values, reason: str | None) -> Any:
        """Run the operation, record it with a reason, and return the result of the method."""
        return await getattr(admin, self.kind)(**values, reason=reason)

    def result(self, result: Any, admin: Admin, values: Values) -> str:
        """Describe the result of :meth:`run`."""
        text = self.done if result or result is None or not self.unchanged else self.unchanged
        return self.text(text, admin, values, **(asdict(result) if isinstance(result, Struct) else {"number": result}))


def _facts(values: Values, admin: Admin) -> dict[str, Any]:
    settings = admin._settings
    since, until, types = values.get("since"), values.get("until"), values.get("types")
    period = [
        f" {word} {time:%Y-%m-%d %H:%M:%S} UTC" for word, time in (("since", since), ("and before", until)) if time
    ]
    return {
        **values,
        "period": "".join(period),
        "namespace": admin._namespace,
        "events": f"all {', '.join(types)} events" if types else "all events",
        "keep_finished": format_duration(settings.keep_finished),
        "keep_dead": format_duration(settings.keep_dead),
    }


def counted(number: int, noun: str) -> str:
    """Format a number with a noun: ``1 row``, ``10,000+ rows``."""
    text = str(number) if isinstance(number, BoundedCount) else f"{number:,}"
    return f"{text} {noun}{'s' * (text != '1')}"


# --- previews ------------------------------------------------------------------------------------


async def _of_key(admin: Admin, values: Values) -> Preview:
    handler, key = values["handler"], values["ordering_key"]
    dead = await admin.count(Filter(states=("DEAD", "EXPIRED"), handler=handler, ordering_key=key))
    behind = await admin.count(Filter(states=("BLOCKED",), handler=handler, ordering_key=key))
    if not dead:
        return Preview(nothing=f"key {key} of {handler} is not parked; outboxio keys shows the parked keys")
    return Preview([f"The key has {counted(dead, 'dead letter')} and {counted(behind, 'blocked notification')}."])


async def _of_pause(admin: Admin, values: Values) -> Preview:
    is_paused = values["handler"] in await admin.paused()
    return Preview(nothing=f"{values['handler']} is paused already" if is_paused else None, is_fulfilled=is_paused)


async def _of_unpause(admin: Admin, values: Values) -> Preview:
    is_paused = values["handler"] in await admin.paused()
    return Preview(nothing=None if is_paused else f"{values['handler']} was not paused")


async def _of_subscriptions(admin: Admin, values: Values) -> Preview:
    unfinished = Filter(states=("PENDING", "FAILED", "BLOCKED", "DYING"), handler=values["handler"])
    return Preview([f"{counted(await admin.count(unfinished), 'waiting notification')} will expire."])


async def _of_run(admin: Admin, values: Values) -> Preview:
    for record in await admin.inspect(values["notification_id"]):
        attempt = f"attempt {record.attempts + 1}, now {record.state}"
        return Preview([f"Run of the handler {record.handler_name} for event {record.event_id} ({attempt})."])
    return Preview(nothing=f"there is no notification {values['notification_id']}; outboxio list shows the ids")


async def _of_operation(admin: Admin, values: Values) -> Preview:
    found = await admin.operation(values["id"])
    if found is None or found.has_ended:
        return Preview(nothing=f"operation {values['id']} {_ENDED}")
    return Preview([f"This {found.kind} has changed {counted(found.done, 'notification')}, which stay changed."])


# --- the operations ------------------------------------------------------------------------------

_HANDLER, _JOB = {"handler": "handler"}, {"name": "job"}
_ENDED = "had finished, or is unknown; outboxio operations shows all operations"

# fmt: off
_ALL = (
    Declared(
        kind="pause", permission="pause", arguments=_HANDLER, look=_of_pause, confirm="on pages",
        does="pause {handler}", button="Pause {handler}",
        effect=["No run of the handler starts, in any process, until an operator unpauses the handler.",
                "Running handlers finish. Events wait, and their retention starts when the pause ends."],
        done="{handler} is paused: no run starts, in any process; outboxio unpause ends the pause",
    ),
    Declared(
        kind="unpause", permission="pause", arguments=_HANDLER, look=_of_unpause, confirm="never",
        does="let {handler} run again",
        done="{handler} runs again", unchanged="{handler} was not paused",
    ),
    Declared(
        kind="partitions", permission="pause", arguments={**_HANDLER, "number": "number"}, confirm="never",
        does="set the number of partitions of {handler} to {number}",
        done="the number of partitions of {handler} is {number}",
    ),
    Declared(
        kind="resume", permission="resume", arguments={"handler": "handler", "ordering_key": "key"}, look=_of_key,
        does="resume the key {ordering_key} of {handler} without its dead letter", button="Resume the key",
        effect=["The dead letters that park the key end SKIPPED: the handler never handles these events.",
                "The notifications blocked behind them run. To run the dead letter again instead, retry it."],
        done="resumed: {number:,} notifications were skipped",
    ),
    Declared(
        kind="replay", permission="replay", arguments=_HANDLER, times=("since", "until"),
        does="run {handler} again for all events{period} that it has finished", button="Replay {handler}",
        effect=["SUCCEEDED, EXPIRED and DEAD notifications of the handler become due again, if their events were "
                "emitted in this period. The handler must tolerate handling an event twice.",
                "Notifications that retention has removed cannot be replayed."],
        done="replayed: {number:,} events are due again",
    ),
    Declared(
        kind="backfill", permission="backfill", arguments=_HANDLER, times=("since",),
        does="send {handler} {events}{period} that it has missed", button="Backfill {handler}",
        effect=["The handler gets a notification for each event in this period that was fanned out without it.",
                "Existing notifications stay as they are."],
        done="backfilled: {number:,} notifications were added",
    ),
    Declared(
        kind="unsubscribe", permission="unsubscribe", arguments=_HANDLER, look=_of_subscriptions, typed="{handler}",
        does="remove the subscriptions of {handler}", button="Unsubscribe {handler}",
        effect=["For a handler that was removed permanently: new events get no notification for it.",
                "A process that still has the handler announces it again within a minute."],
        done="unsubscribed: {number:,} subscriptions were removed",
    ),
    Declared(
        kind="purge", permission="purge", typed="{namespace}",
        does="remove the old rows of {namespace}", button="Purge",
        effect=["Notifications and events that finished more than {keep_finished} ago are removed, and dead letters of "
                "more than {keep_dead} ago.",
                "Nothing unfinished is removed, and no dead letter that parks a key. Running processes remove the same "
                "rows gradually."],
        done="removed {notifications:,} notifications, {events:,} events, {consumed_events:,} consumed_events",
    ),
    Declared(
        kind="cancel", permission="cancel", arguments={"notification_id": "id"}, look=_of_run, confirm="on pages",
        does="cancel the run of notification {notification_id}", button="Cancel the run",
        effect=["The process that has the run cancels it within about a second. The attempt has failed, and the retry "
                "policy decides what follows: skip the notification as well if it should not run again.",
                "A handler that is a plain function runs in a thread, and cannot be cancelled."],
        done="cancelled: the attempt has failed, and the retry policy applies",
        unchanged="no run was cancelled",
    ),
    Declared(
        kind="stop", permission="stop", arguments={"id": "id"}, look=_of_operation, confirm="never",
        does="stop operation {id}",
        done="operation {id} stops after the batch in progress", unchanged="operation {id} " + _ENDED,
    ),
    Declared(
        kind="pause_job", permission="pause", arguments=_JOB,
        does="pause the job {name}", button="Pause {name}",
        effect=["No run of the job starts, in any process, until an operator unpauses the job. A running job finishes.",
                "Scheduled times that pass in the meantime are skipped."],
        done="job {name} is paused",
    ),
    Declared(
        kind="unpause_job", permission="pause", arguments=_JOB, confirm="never",
        does="let the job {name} run again",
        done="job {name} runs again",
    ),
    Declared(
        kind="run_job_now", permission="run_job", arguments=_JOB,
        does="run the job {name} now", button="Run {name}",
        effect=["A process with the job starts a run within about a second, even if the job is paused.",
                "A run in progress finishes first. The schedule stays as it is."],
        done="job {name} runs now",
    ),
    Declared(
        kind="remove_job", permission="unsubscribe", arguments=_JOB, typed="{name}",
        does="remove the row of the job {name}", button="Remove {name}",
        effect=["For a job that no process has any more: its counts, its last error and its pause are deleted.",
                "A process that still has the job inserts a new row within about a minute."],
        done="job {name} is removed",
    ),
)
# fmt: on

DECLARED = {declared.kind: declared for declared in _ALL}
