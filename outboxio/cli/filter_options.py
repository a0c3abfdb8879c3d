"""The filter options that all commands on notifications share."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import typer

from outboxio.cli.options import Options
from outboxio.cli.target import TargetError
from outboxio.model.notification import State
from outboxio.model.operating.groups import Filter
from outboxio.operations.queries.filters import EXPECTED_TIME, TEXTS, parse_time, query_of
from outboxio.support.text import briefly


class FilterOptions(Options, frozen=True):
    """The options that select notifications."""

    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            "-s",
            metavar="STATE",
            help="Only this state; may be repeated.",
            show_default=False,
            autocompletion=lambda: [str(state) for state in State],
        ),
    ] = None
    handler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this handler, including its aliases.", show_default=False)
    ] = None
    type: Annotated[str | None, typer.Option(metavar="TYPE", help="Only this event type.", show_default=False)] = None
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only this ordering key.", show_default=False)] = None
    model: Annotated[
        str | None, typer.Option(metavar="ID", help="Only the model with this id.", show_default=False)
    ] = None
    action: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this action, by name or id.", show_default=False),
    ] = None
    correlation: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this correlation id.", show_default=False)
    ] = None
    error: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only with this text in the last error ([cyan]TypeName: message[/]); * matches any text.",
            show_default=False,
        ),
    ] = None
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only changed since this time: a date, or an age (2h, 3d).", show_default=False
        ),
    ] = None
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only changed before this time.", show_default=False)
    ] = None

    @property
    def is_empty(self) -> bool:
        """True if no option is set: everything matches."""
        return self == FilterOptions()

    def filter(self, *states: str) -> Filter:
        """Return the filter. ``states``: the states to use if the command line has none."""
        return Filter(
            states=tuple(state.upper() for state in self.state) if self.state else states,
            **{field: getattr(self, option) for option, field in TEXTS.items()},
            since=None if self.since is None else time_option(self.since, "--since"),
            until=None if self.until is None else time_option(self.until, "--until"),
        )


def time_option(text: str, option: str) -> datetime:
    """Parse a date, or a duration before now, as naive UTC. Raises :class:`TargetError` for any other text."""
    time = parse_time(text)
    if time is None:
        raise TargetError(f"{option} {briefly(text)}: expected {EXPECTED_TIME}")
    return time


def parse_id(text: str) -> UUID:
    """Parse the id of an event, a notification or an operation. Raises :class:`TargetError` for any other text."""
    try:
        return UUID(text)
    except ValueError:
        raise TargetError(
            f"invalid id {briefly(text)}; expected a UUID, as shown by outboxio list, list-events and operations"
        ) from None


def filter_arguments(filter: Filter) -> list[str]:
    """Return the command line options for a filter."""
    return [part for name, values in query_of(filter).items() for value in values for part in (f"--{name}", value)]
