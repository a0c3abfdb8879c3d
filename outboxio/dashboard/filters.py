"""The fields of a query or a form, and the filter that they select."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

from outboxio.dashboard.access import Access
from outboxio.dashboard.view import Refused
from outboxio.errors import ConfigurationError
from outboxio.model.notification import State
from outboxio.model.operating.groups import Filter
from outboxio.operations.queries.filters import EXPECTED_TIME, TEXTS, filter_argument, parse_time
from outboxio.support.text import briefly, instead_of

MAX_FIELDS = 2_000


class Fields(Mapping[str, str]):
    """Fields by name, possibly with several values: ``fields["state"]`` is the last, ``fields.all("state")`` are all.

    Empty values are left out, because forms submit empty inputs as empty text.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            if value:
                self._values.setdefault(name, []).append(value)

    @classmethod
    def parsed(cls, text: str) -> Fields:
        """Parse ``a=1&b=2``. Raises ``ValueError`` for more than 2,000 fields."""
        return cls(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="replace"))

    def __getitem__(self, name: str) -> str:
        return self._values[name][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def all(self, name: str) -> list[str]:
        """Return all values of a name, in the order of the query or form."""
        return list(self._values.get(name, ()))

    def pairs(self) -> list[tuple[str, str]]:
        """Return all names with each value."""
        return [(name, value) for name, values in self._values.items() for value in values]


# --- the filter of a page -------------------------------------------------------------------------
#
# Its URL parameters have the names of the options of the command line.


Values = Callable[[str], Sequence[str]]
"""Returns all values of a parameter: ``request.values`` for a URL, ``form.all`` for a form."""

PARAMETERS = ("state", *TEXTS, "since", "until")
"""The parameters of a filter, in the order of the command line options."""

EVENT_PARAMETERS = ("type", "key", "model", "action", "correlation", "since", "until")
"""The parameters that apply to events: states, handlers and errors belong to notifications."""

PAYLOAD_PARAMETERS = ("error",)
"""The parameters about texts that only users with the right ``payloads`` may read."""

_NAMES = ("handler", "type", "action")  # names, which neither begin nor end with a space


def filter_of(values: Values, *states: State | str, now: datetime | None = None) -> Filter:
    """Return the filter of the parameters, validated. An empty value counts as absent.

    ``states``: the default states. ``now``: naive UTC, the time to which "2h" is relative.

    Raises :class:`ConfigurationError` for a value that nothing can match, and for a repeated parameter other than
    ``state``.

    Example::

        filter_of(request.values, "DEAD", "EXPIRED")  # of /dead?handler=invoice-pdf&since=2h
    """
    named = [state.strip().upper() for state in values("state") if state.strip()]
    fields: dict[str, Any] = {field: _text(values, name) for name, field in TEXTS.items()}
    times: dict[str, Any] = {name: _time(values, name, now) for name in ("since", "until")}
    return filter_argument(Filter(states=tuple(named) or states, **fields, **times))


def refuse_unknown_parameters(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise :class:`ConfigurationError` for an unknown parameter.

    Without this check, a typo in a parameter name would widen the filter.
    """
    known_names = list(known)
    for name in names:
        if name not in known_names:
            raise ConfigurationError(f"this page has no filter {briefly(name)}: {instead_of(name, known_names)}")


def refuse_payload_parameters(names: Iterable[str], access: Access) -> None:
    """Raise :class:`Refused` for a filter on a text that the user may not read.

    Whether a row matches reveals whether the text contains a guess, so a user could read it letter by letter.
    """
    for name in names:
        if name in PAYLOAD_PARAMETERS and not access.may("payloads"):
            raise Refused(
                403, f"{access.actor} does not have the right `payloads` here, and cannot filter by {name}.",
                f"Remove the filter {name}. Rights are granted by the authorize function of the dashboard.",
            )  # fmt: skip


def describe_filter(filter: Filter, things: str = "notifications") -> str:
    """Describe what a filter selects. ``things``: ``notifications`` or ``events``.

    Example::

        describe_filter(Filter(states=("DEAD",), handler="invoice-pdf", since=datetime(2026, 1, 31, 2, 41)))
        # "DEAD notifications of the handler “invoice-pdf”, changed since 2026-01-31 02:41 UTC"
    """
    states = [str(state) for state in filter.states]
    several = f"{', '.join(states[:-1])} or {states[-1]} " if len(states) > 1 else "".join(f"{one} " for one in states)
    action = f"of the action {_quoted(filter.action)}"
    parts: Mapping[str, object | None] = {
        f"of the handler {_quoted(filter.handler)}": filter.handler,
        f"of the type {_quoted(filter.event_type)}": filter.event_type,
        f"with the key {_quoted(filter.ordering_key)}": filter.ordering_key,
        f"of the model {_quoted(filter.model_id)}": filter.model_id,
        action: filter.action,
        f"with the correlation id {_quoted(filter.correlation_id)}": filter.correlation_id,
        f"with {_quoted(filter.error)} in the last error": filter.error,
    }
    described = [part for part, value in parts.items() if value is not None]
    changed = "changed" if things == "notifications" else "emitted"
    times = [
        f"{name} {_shown(time)}"
        for name, time in (("since", filter.since), ("before", filter.until))
        if time is not None
    ]
    first = described[:1]
    text = "".join(f" {part}" for part in first) + "".join(f", {part}" for part in described[1:])
    when = f"{',' if described else ''} {changed} {' and '.join(times)}" if times else ""
    subject = f"{several}{things}" if several or text or when else f"all {things}"
    return f"{subject}{text}{when}"


# --- helpers --------------------------------------------------------------------------------------


def _text(values: Values, name: str) -> str | None:
    found = list(dict.fromkeys(value for value in values(name) if value.strip()))
    if len(found) > 1:
        raise ConfigurationError(
            f"{name} has {len(found)} values, {briefly(found[0])} and {briefly(found[1])}; use {name} only once"
        )
    if not found:
        return None
    return found[0].strip() if name in _NAMES else found[0]


def _time(values: Values, name: str, now: datetime | None) -> datetime | None:
    text = _text(values, name)
    if text is None:
        return None
    time = parse_time(text, now=now)
    if time is None:
        raise ConfigurationError(f"{name} is {briefly(text)}; expected {EXPECTED_TIME}")
    return time


def _quoted(value: object) -> str:
    return f"“{value}”"


def _shown(time: datetime) -> str:
    """Return a time, without seconds if they are zero."""
    return f"{time.isoformat(' ', 'seconds' if time.second or time.microsecond else 'minutes')} UTC"
