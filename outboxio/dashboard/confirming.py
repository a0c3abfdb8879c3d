"""The second step of an order: a page says what the order would do, asks for a reason, and orders."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from outboxio.dashboard.asked import Asked, checked_back
from outboxio.dashboard.fields import Fields
from outboxio.dashboard.view import View
from outboxio.operations.ordering.recorder import LONGEST_TEXT

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
