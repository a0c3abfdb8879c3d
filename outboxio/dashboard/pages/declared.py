"""The declared operations: a page that asks, unless the operation can be undone at once, and then the operation."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.confirming import Confirmation, Input, WrongValue, after, back_of, carried_out, given, reason_of
from outboxio.dashboard.filters import Fields
from outboxio.dashboard.view import Done, Order, Refused, View
from outboxio.operations.declared import DECLARED, Declared
from outboxio.operations.queries.filters import EXPECTED_MOMENT, parse_moment

_LABELS = {"since": "Events emitted since (UTC)", "until": "and before (UTC)"}
_HINTS = {"since": "2h, 3d, 2026-01-31T02:41", "until": "now"}


def declared_orders() -> list[Order]:
    """The POSTs of all declared operations."""
    return [Order(d.kind, f"/orders/{d.kind.replace('_', '-')}", _function(d), d.permission) for d in DECLARED.values()]


def _function(declared: Declared) -> Any:
    async def order(asked: Asked, form: Fields) -> Done | View:
        return await _ordered(declared, asked, form)

    return order


async def _ordered(declared: Declared, asked: Asked, form: Fields) -> Done | View:
    values: dict[str, Any] = {name: given(form, field) for name, field in declared.arguments.items()}

    async def carry_out(reason: str | None) -> object:
        times = {name: await _time(asked, name, form.get(name)) for name in declared.times}
        if "since" in times and times["since"] is None:
            raise WrongValue(f"since is missing: expected {EXPECTED_MOMENT}.")
        return await declared.run(asked.admin, {**values, **times}, reason)

    if declared.kind == "stop":
        if not await carry_out(reason_of(form)):
            raise Refused(409, "The operation has already ended.", "Notifications that were changed stay changed.")
        return Done()
    if declared.asks == "never":
        return await carried_out(declared.kind, asked, form, carry_out)
    return await after(await _confirmation(declared, asked, form, values), asked, form, carry_out)


async def _confirmation(declared: Declared, asked: Asked, form: Fields, values: Mapping[str, Any]) -> Confirmation:
    does = declared.text(declared.does, asked.admin, values)
    return Confirmation(
        order=declared.kind, right=declared.permission, question=f"{does[:1].upper()}{does[1:]}?",
        told=(await declared.preview(asked.admin, values)).effect,
        button=declared.text(declared.button, asked.admin, values),
        fields=[(field, values[name]) for name, field in declared.arguments.items()],
        inputs=[
            Input(name=name, label=_LABELS[name], hint=_HINTS[name], value=form.get(name) or "")
            for name in declared.times
        ],
        typed=declared.typed and declared.text(declared.typed, asked.admin, values),
        reason=form.get("reason", ""), back=back_of(form),
    )  # fmt: skip


async def _time(asked: Asked, name: str, text: str | None) -> datetime | None:
    """A time of the form; a duration counts from the time of the database."""
    if text is None:
        return None
    time = parse_moment(text, now=(await asked.admin.overview()).read_date)
    if time is None:
        raise WrongValue(f"{name} is {text[:40]}: expected {EXPECTED_MOMENT}.")
    return time
