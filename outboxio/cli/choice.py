"""The filter of a command: the same options, with the same meaning, wherever notifications are chosen."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import typer

from outboxio.cli.options import Options
from outboxio.cli.target import TargetError
from outboxio.model.notification import State
from outboxio.model.operating.groups import Filter
from outboxio.operations.queries.filters import EXPECTED_MOMENT, TEXTS, parse_moment, query_of
from outboxio.support.text import briefly


class Choice(Options, frozen=True):
    """Which notifications."""

    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            "-s",
            metavar="STATE",
            help="Of this state; may be repeated.",
            show_default=False,
            autocompletion=lambda: [str(state) for state in State],
        ),
    ] = None
    handler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of this handler, its aliases included.", show_default=False)
    ] = None
    type: Annotated[str | None, typer.Option(metavar="TYPE", help="Of this event type.", show_default=False)] = None
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Of this ordering key.", show_default=False)] = None
    model: Annotated[str | None, typer.Option(metavar="ID", help="Of the model with this id.", show_default=False)] = (
        None
    )
    action: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of this action, by name or by id.", show_default=False),
    ] = None
    correlation: Annotated[
        str | None, typer.Option(metavar="ID", help="Of this correlation id.", show_default=False)
    ] = None
    error: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="With this text in the last error, [cyan]TypeName: message[/]; * stands for any text.",
            show_default=False,
        ),
    ] = None
    since: Annotated[
        str | None,
        typer.Option(metavar="MOMENT", help="Changed since: a date, or how long ago (2h, 3d).", show_default=False),
    ] = None
    until: Annotated[str | None, typer.Option(metavar="MOMENT", help="Changed before.", show_default=False)] = None

    @property
    def is_empty(self) -> bool:
        """True without any option: everything is chosen."""
        return self == Choice()

    def filter(self, *states: str) -> Filter:
        """The filter. ``states``: the states if the command line names none."""
        return Filter(
            states=tuple(state.upper() for state in self.state) if self.state else states,
            **{field: getattr(self, word) for word, field in TEXTS.items()},
            since=None if self.since is None else moment(self.since, "--since"),
            until=None if self.until is None else moment(self.until, "--until"),
        )


def moment(text: str, option: str) -> datetime:
    """A moment as naive UTC: a date, or a duration before now. Raises :class:`TargetError` for any other text."""
    given = parse_moment(text)
    if given is None:
        raise TargetError(f"{option} {briefly(text)}: expected {EXPECTED_MOMENT}")
    return given


def given_id(text: str) -> UUID:
    """The id of an event, a notification or an order. Raises :class:`TargetError` for any other text."""
    try:
        return UUID(text)
    except ValueError:
        raise TargetError(
            f"{briefly(text)} is no id; expected a UUID, as outboxio list, list-events and operations show it"
        ) from None


def words_of(filter: Filter) -> list[str]:
    """The options that choose the notifications of a filter."""
    return [part for word, values in query_of(filter).items() for value in values for part in (f"--{word}", value)]
