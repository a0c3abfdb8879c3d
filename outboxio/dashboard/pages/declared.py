"""The actions for declared operations, with a confirmation page unless the operation is easily undone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from outboxio.dashboard.confirming import (
    Confirmation,
    Input,
    WrongValue,
    after,
    back_of,
    carried_out,
    reason_of,
    required_field,
)
from outboxio.dashboard.filters import Fields
from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.view import Done, FormAction, Refused, View
from outboxio.operations.declared import DECLARED, Declared
from outboxio.operations.queries.filters import EXPECTED_TIME, parse_time

_LABELS = {"since": "Events emitted since (UTC)", "until": "and before (UTC)"}
_HINTS = {"since": "2h, 3d, 2026-01-31T02:41", "until": "now"}


def declared_actions() -> list[FormAction]:
    """Return the actions of all declared operations."""
    return [
        FormAction(one.kind, f"/operations/{one.kind.replace('_', '-')}", _function(one), one.permission)
        for one in DECLARED.values()
    ]


def _function(declared: Declared) -> Any:
    async def action(request: PageRequest, form: Fields) -> Done | View:
        return await _handle(declared, request, form)

    return action


async def _handle(declared: Declared, request: PageRequest, form: Fields) -> Done | View:
    values: dict[str, Any] = {name: required_field(form, field) for name, field in declared.arguments.items()}

    async def carry_out(reason: str | None) -> object:
        times = {name: await _time(request, name, form.get(name)) for name in declared.times}
        if "since" in times and times["since"] is None:
            raise WrongValue(f"since is missing; expected {EXPECTED_TIME}.")
        return await declared.run(request.admin, {**values, **times}, reason)

    if declared.kind == "stop":
        if not await carry_out(reason_of(form)):
            raise Refused(409, "The operation has already finished.", "Notifications that it has changed stay changed.")
        return Done()
    if declared.confirm == "never":
        return await carried_out(declared.kind, request, form, carry_out)
    return await after(await _confirmation(declared, request, form, values), request, form, carry_out)


async def _confirmation(
    declared: Declared, request: PageRequest, form: Fields, values: Mapping[str, Any]
) -> Confirmation:
    does = declared.text(declared.does, request.admin, values)
    return Confirmation(
        operation=declared.kind, right=declared.permission, question=f"{does[:1].upper()}{does[1:]}?",
        effects=(await declared.preview(request.admin, values)).effect,
        button=declared.text(declared.button, request.admin, values),
        fields=[(field, values[name]) for name, field in declared.arguments.items()],
        inputs=[
            Input(name=name, label=_LABELS[name], hint=_HINTS[name], value=form.get(name) or "")
            for name in declared.times
        ],
        typed=declared.typed and declared.text(declared.typed, request.admin, values),
        reason=form.get("reason", ""), back=back_of(form),
    )  # fmt: skip


async def _time(request: PageRequest, name: str, text: str | None) -> datetime | None:
    """Return a time of the form. Durations are relative to the time of the database."""
    if text is None:
        return None
    time = parse_time(text, now=(await request.admin.overview()).read_date)
    if time is None:
        raise WrongValue(f"{name} is {text[:40]}; expected {EXPECTED_TIME}.")
    return time
