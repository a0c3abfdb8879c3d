"""The fields of a query or of a form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import parse_qsl

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
