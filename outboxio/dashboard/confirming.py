"""Confirmation pages: show what an operation would do, and ask for a reason before it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.filters import Fields
from outboxio.dashboard.page_request import PageRequest, checked_back
from outboxio.dashboard.view import Done, Refused, View
from outboxio.model.operating.operation import Operation
from outboxio.operations.recorder import LONGEST_TEXT

SURE = "sure"
"""The hidden field that confirms the operation."""


class Input(Struct, frozen=True, kw_only=True):
    """A text that the user enters."""

    name: str
    label: str
    hint: str = ""
    value: str = ""


class Confirmation(Struct, frozen=True, kw_only=True):
    """The facts shown on a confirmation page."""

    operation: str
    right: str = ""
    """The required right; empty if it has the operation's name."""
    question: str
    effects: Sequence[str]
    """Sentences about the effect."""
    button: str
    """The text of the button; empty if there is nothing to do."""
    fields: Sequence[tuple[str, str]]
    """Hidden fields of the form."""
    inputs: Sequence[Input] = ()
    typed: str | None = None
    """The text that the user has to type, for operations that remove or skip many rows."""
    asks_reason: bool = True
    reason: str = ""
    wrong: str | None = None
    """What is wrong with the submitted values."""
    back: str = "/"
    """The page where the operation was started, below the mount."""
    longest_reason: int = LONGEST_TEXT


def confirm(confirmation: Confirmation) -> View:
    """Return the view of a confirmation."""
    return View(
        template="confirm.html", title=confirmation.question, facts=confirmation, refreshes=False,
        status=422 if confirmation.wrong else 200,
    )  # fmt: skip


def is_sure(form: Fields) -> bool:
    """True if the user has confirmed the operation."""
    return SURE in form


def back_of(form: Fields) -> str:
    """Return the page where the operation was started."""
    return checked_back(form.get("back"))


def reason_of(form: Fields) -> str | None:
    """Return the reason that the user has entered."""
    return form.get("reason")


def wrong_text(form: Fields, typed: str | None) -> str | None:
    """Return an error if the user had to type a text and has typed another one."""
    if typed is None or _plain(form.get("typed", "")) == _plain(typed):
        return None
    return f"Type {typed} to confirm; the field contains {form.get('typed') or 'no text'}."


def _plain(text: str) -> str:
    """Return a name as it is, and a number without commas."""
    return text.replace(",", "") if text.replace(",", "").isdecimal() else text


async def has_background_process(request: PageRequest) -> bool:
    """True if a process runs operations in the background: this one, or one that fans out."""
    if all(statistics.live is not None for statistics in request.outbox.statistics.values()):
        return True
    overview = await request.admin.overview()
    fans_out = {shard for one in overview.instances if one.is_alive and "fanout" in one.roles for shard in one.shards}
    return all(shard.shard in fans_out for shard in overview.shards)


# --- operations with a confirmation ---------------------------------------------------------------


_NEWEST = 20  # operations that are searched for the one of this request

Carry = Callable[[str | None], Awaitable[object]]
"""Runs the operation, with a reason."""


class WrongValue(Exception):
    """A submitted value that the user has to correct."""


async def after(confirmation: Confirmation, request: PageRequest, form: Fields, carry_out: Carry) -> Done | View:
    """Run an operation that the user has confirmed, or else show the confirmation page."""
    if not is_sure(form):
        return confirm(confirmation)
    if wrong := wrong_text(form, confirmation.typed):
        return confirm(replace(confirmation, wrong=wrong))
    try:
        return await carried_out(confirmation.operation, request, form, carry_out)
    except WrongValue as error:
        return confirm(replace(confirmation, wrong=str(error)))


async def carried_out(kind: str, request: PageRequest, form: Fields, carry_out: Carry) -> Done:
    """Run an operation, and find its record, which the next page shows."""
    known = {one.id for one in await _operations_of(kind, request)}
    await carry_out(reason_of(form))
    new = [one for one in await _operations_of(kind, request) if one.id not in known]
    return Done(operation=new[0].id if new else None)


async def _operations_of(kind: str, request: PageRequest) -> list[Operation]:
    """Return the user's newest operations of this kind on the dashboard."""
    actor = request.access.actor
    return [
        one for one in await request.admin.operations(_NEWEST)
        if one.kind == kind and one.actor == actor and one.origin == "dashboard"
    ]  # fmt: skip


def required_field(form: Fields, name: str) -> str:
    """Return a field of the form. Raises :class:`Refused` if it is missing."""
    value = form.get(name)
    if value is None:
        raise Refused(400, f"The form has no field {name}.", "Start the operation from its page.")
    return value
