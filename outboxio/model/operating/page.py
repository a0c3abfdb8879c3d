"""Answers that are bounded: a page of a list, and a count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


class Page(list[T]):
    """A part of a list, the newest first, and the text with which the list goes on.

    Example::

        page = await outbox.admin.list(state="DEAD")
        while page.next is not None:
            page = await outbox.admin.list(state="DEAD", after=page.next)
    """

    def __init__(self, rows: Iterable[T] = (), next: str | None = None) -> None:
        super().__init__(rows)
        self.next = next
        """The argument ``after`` for the next page; ``None`` at the end of the list.

        A page may have fewer rows than the limit, or none, and a text: the read ended at its bound.
        """


class BoundedCount(int):
    """A number that was counted up to a bound. ``str`` shows a count that ended at the bound as ``10,000+``.

    Example::

        dead = await outbox.admin.count(Filter(states=("DEAD",)))
        print(f"{dead} dead letters")  # 10,000+ dead letters
    """

    is_complete: bool
    """False if there are more matches, or there may be."""

    def __new__(cls, number: int, *, is_complete: bool = True) -> BoundedCount:
        made = super().__new__(cls, number)
        made.is_complete = is_complete
        return made

    def __str__(self) -> str:
        return f"{int(self):,}{'' if self.is_complete else '+'}"

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else str(self)
