"""Orders of two steps: the first step shows the page that asks, the second step carries the order out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.confirming import Confirmation, confirm, is_sure, reason_of, wrong_text
from outboxio.dashboard.fields import Fields
from outboxio.dashboard.view import Done, Refused, View
from outboxio.model.operating.operation import Operation

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
