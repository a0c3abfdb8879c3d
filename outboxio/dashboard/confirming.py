"""The second step of an order: a page says what the order would do, asks for a reason, and orders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from outboxio.dashboard.asked import Asked, checked_back
from outboxio.dashboard.filters import Fields
from outboxio.dashboard.view import Done, Refused, View
from outboxio.model.operating.operation import Operation
from outboxio.operations.recorder import LONGEST_TEXT

SURE = "sure"
"""The hidden field of the second step."""


class Input(Struct, frozen=True, kw_only=True):
    """A text that the user enters."""

    name: str
    label: str
    hint: str = ""
    value: str = ""


class Confirmation(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    order: str
    right: str = ""
    """The right to give the order; empty for the right with the name of the order."""
    question: str
    told: Sequence[str]
    """Sentences about the effect."""
    button: str
    """The text of the button; empty if nothing can be ordered."""
    fields: Sequence[tuple[str, str]]
    """Hidden fields of the form."""
    inputs: Sequence[Input] = ()
    typed: str | None = None
    """The text that the user has to type, so that a single click does not remove much."""
    asks_reason: bool = True
    reason: str = ""
    wrong: str | None = None
    """What is wrong with the values that the user has sent."""
    back: str = "/"
    """The page on which the order began, below the mount."""
    longest_reason: int = LONGEST_TEXT


def confirm(confirmation: Confirmation) -> View:
    """The page of a confirmation."""
    return View(
        template="confirm.html", title=confirmation.question, facts=confirmation, refreshes=False,
        status=422 if confirmation.wrong else 200,
    )  # fmt: skip


def is_sure(form: Fields) -> bool:
    """True in the second step."""
    return SURE in form


def back_of(form: Fields) -> str:
    """The page on which the order began."""
    return checked_back(form.get("back"))


def reason_of(form: Fields) -> str | None:
    """The reason that the user has given."""
    return form.get("reason")


def wrong_text(form: Fields, typed: str | None) -> str | None:
    """What is wrong if the user had to type a text, and has typed a different text."""
    if typed is None or _plain(form.get("typed", "")) == _plain(typed):
        return None
    return f"Type {typed} to confirm; the field has {form.get('typed') or 'no text'}."


def _plain(text: str) -> str:
    """A name, or a number with or without the commas."""
    return text.replace(",", "") if text.replace(",", "").isdecimal() else text


async def someone_works(asked: Asked) -> bool:
    """True if a process carries out orders in the background: this process, or a process that fans out."""
    if all(statistics.live is not None for statistics in asked.outbox.statistics.values()):
        return True
    overview = await asked.admin.overview()
    fans_out = {shard for one in overview.instances if one.is_alive and "fanout" in one.roles for shard in one.shards}
    return all(shard.shard in fans_out for shard in overview.shards)


# --- orders of two steps --------------------------------------------------------------------------
#
# Orders of two steps: the first step shows the page that asks, the second step carries the order out.


_NEWEST = 20  # orders among which the order of this request is sought

Carry = Callable[[str | None], Awaitable[object]]
"""Carries the order out, with a reason."""


class WrongValue(Exception):
    """A value of the form that the user has to correct."""


async def after(confirmation: Confirmation, asked: Asked, form: Fields, carry_out: Carry) -> Done | View:
    """Carry an order out in the second step, and show the page of the first step otherwise."""
    if not is_sure(form):
        return confirm(confirmation)
    if wrong := wrong_text(form, confirmation.typed):
        return confirm(replace(confirmation, wrong=wrong))
    try:
        return await carried_out(confirmation.order, asked, form, carry_out)
    except WrongValue as error:
        return confirm(replace(confirmation, wrong=str(error)))


async def carried_out(kind: str, asked: Asked, form: Fields, carry_out: Carry) -> Done:
    """Carry an order out, and find its record, which the next page shows."""
    known = {one.id for one in await _orders_of(kind, asked)}
    await carry_out(reason_of(form))
    new = [one for one in await _orders_of(kind, asked) if one.id not in known]
    return Done(operation=new[0].id if new else None)


async def _orders_of(kind: str, asked: Asked) -> list[Operation]:
    """The newest orders of this kind that the user has given here."""
    actor = asked.access.actor
    return [
        one for one in await asked.admin.operations(_NEWEST)
        if one.kind == kind and one.actor == actor and one.origin == "dashboard"
    ]  # fmt: skip


def given(form: Fields, name: str) -> str:
    """A field of the form. Raises :class:`Refused` if the form has no such field."""
    value = form.get(name)
    if value is None:
        raise Refused(400, f"The form has no {name}.", "Give the order from its page.")
    return value
