"""The fields of a query or of a form."""

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
from outboxio.operations.queries.filters import EXPECTED_MOMENT, TEXTS, given_filter, parse_moment
from outboxio.support.text import briefly, instead_of

MOST_FIELDS = 2_000


class Fields(Mapping[str, str]):
    """Fields by name. A name may have several values: ``fields["state"]`` is the last, ``fields.all("state")`` has all.

    Empty values are left out, because a form sends a field without input as the empty text.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            if value:
                self._values.setdefault(name, []).append(value)

    @classmethod
    def parsed(cls, text: str) -> Fields:
        """The fields of ``a=1&b=2``. Raises ``ValueError`` for more than 2,000 fields."""
        return cls(parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="replace"))

    def __getitem__(self, name: str) -> str:
        return self._values[name][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def all(self, name: str) -> list[str]:
        """All values of a name, in the order of the query or form."""
        return list(self._values.get(name, ()))

    def pairs(self) -> list[tuple[str, str]]:
        """All names with each value."""
        return [(name, value) for name, values in self._values.items() for value in values]


# --- the filter of a page -------------------------------------------------------------------------
#
# The filter of a page: its words in the URL, which are the words of the command line, and its words in a sentence.


Values = Callable[[str], Sequence[str]]
"""Returns all values of a word: ``asked.values`` for a URL, ``form.getlist`` for a form."""

WORDS = ("state", *TEXTS, "since", "until")
"""The words of a filter, in the order of the options of the command line."""

WORDS_OF_EVENTS = ("type", "key", "model", "action", "correlation", "since", "until")
"""The words that an event has: states, handlers and errors belong to notifications."""

HIDDEN_WORDS = ("error",)
"""The words about texts that only users with the right ``payloads`` may read."""

_NAMES = ("handler", "type", "action")  # names, which neither begin nor end with a space


def filter_of(values: Values, *states: State | str, now: datetime | None = None) -> Filter:
    """The filter that the words say, checked. A word with an empty value counts as absent.

    ``states``: the states of the filter if the words name none. ``now``: naive UTC, the moment from which "2h" counts.

    Raises :class:`ConfigurationError` with the word, the value and the remedy: for a value that nothing matches, and
    for a word with two values (only ``state`` may be repeated).

    Example::

        filter_of(asked.values, "DEAD", "EXPIRED")  # of /dead?handler=invoice-pdf&since=2h
    """
    named = [state.strip().upper() for state in values("state") if state.strip()]
    fields: dict[str, Any] = {field: _text(values, word) for word, field in TEXTS.items()}
    moments: dict[str, Any] = {word: _moment(values, word, now) for word in ("since", "until")}
    return given_filter(Filter(states=tuple(named) or states, **fields, **moments))


def refuse_unknown_words(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise :class:`ConfigurationError` for a word of a URL that a page does not know.

    Without this check, a typing error in a word would make a filter wider.
    """
    names = list(known)
    for word in given:
        if word not in names:
            raise ConfigurationError(f"this page has no filter {briefly(word)}: {instead_of(word, names)}")


def refuse_hidden_words(given: Iterable[str], access: Access) -> None:
    """Raise :class:`Refused` for a filter on a text that the user may not read.

    Whether a row matches says whether the text contains a guess, so that a user could read it letter by letter.
    """
    for word in given:
        if word in HIDDEN_WORDS and not access.may("payloads"):
            raise Refused(
                403, f"{access.actor} does not have the right `payloads` here, and cannot filter by {word}.",
                f"Leave out the filter {word}. The function authorize of the dashboard gives the rights.",
            )  # fmt: skip


def in_words(filter: Filter, things: str = "notifications") -> str:
    """What a filter selects, as the end of a sentence. ``things``: ``notifications`` or ``events``.

    Example::

        in_words(Filter(states=("DEAD",), handler="invoice-pdf", since=datetime(2026, 1, 31, 2, 41)))
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
    said = [part for part, value in parts.items() if value is not None]
    changed = "changed" if things == "notifications" else "emitted"
    moments = [
        f"{word} {_shown(moment)}"
        for word, moment in (("since", filter.since), ("before", filter.until))
        if moment is not None
    ]
    first = said[:1]
    told = "".join(f" {part}" for part in first) + "".join(f", {part}" for part in said[1:])
    when = f"{',' if said else ''} {changed} {' and '.join(moments)}" if moments else ""
    subject = f"{several}{things}" if several or told or when else f"all {things}"
    return f"{subject}{told}{when}"


# --- inside --------------------------------------------------------------------------------------


def _text(values: Values, word: str) -> str | None:
    given = list(dict.fromkeys(value for value in values(word) if value.strip()))
    if len(given) > 1:
        raise ConfigurationError(
            f"{word} has {len(given)} values, {briefly(given[0])} and {briefly(given[1])}; give {word} once"
        )
    if not given:
        return None
    return given[0].strip() if word in _NAMES else given[0]


def _moment(values: Values, word: str, now: datetime | None) -> datetime | None:
    text = _text(values, word)
    if text is None:
        return None
    moment = parse_moment(text, now=now)
    if moment is None:
        raise ConfigurationError(f"{word} is {briefly(text)}; expected {EXPECTED_MOMENT}")
    return moment


def _quoted(value: object) -> str:
    return f"“{value}”"


def _shown(moment: datetime) -> str:
    """A moment, to the minute if there are no seconds."""
    return f"{moment.isoformat(' ', 'seconds' if moment.second or moment.microsecond else 'minutes')} UTC"
