"""The task of a run, and its result."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from msgspec import Struct

Figures = dict[str, Any]
"""The measurements of a run: numbers by name, and series of numbers for charts."""


class Task(Struct, frozen=True):
    """A contestant's work, on an empty database."""

    scenario: str
    contestant: str
    dialect: str
    url: str
    options: dict[str, Any]

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    @classmethod
    def from_arguments(cls) -> Task:
        return msgspec.json.decode(sys.argv[1], type=cls)

    def as_argument(self) -> str:
        return msgspec.json.encode(self).decode()


def answer(figures: Figures) -> None:
    """Print the figures as the last line of a run."""
    print(msgspec.json.encode(figures).decode(), flush=True)
