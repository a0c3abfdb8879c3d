"""The history of a chaos run: the steps of each process, as lines in a file per process.

A line is written with a single system call, so that it survives a kill right afterwards. ``at`` is CLOCK_MONOTONIC,
which all processes of a machine share, so the lines of a run have a common order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

WHAT = {
    # of a producer
    "attempt": "an action is about to end, with these events",
    "commit": "it is committed", "rollback": "it is not", "commit_unknown": "the outcome is unknown",
    # of an instance
    "running": "running() is entered", "leaving": "it received SIGTERM",
    "left": "running() is left, and the outbox is closed",
    "taken": "a cluster lock, with its term", "lost": "a cluster lock", "released": "cluster locks, voluntarily",
    "proven": "the locks are proven until then",
    "spread": "the number of partitions of a handler rose or fell by itself",
    "blocking": "a handler blocks the event loop until then",
    "start": "a handler is called for an event", "effect": "it did its work", "finish": "it ended",
    "settling": "outcomes are about to be written", "settled": "so many of them were", "refusal": "so many were not",
    "reopened": "an operator let the notification run again", "skipped": "an operator ended the notification",
    "counters": "what the instance counted", "tasks": "tasks that are left over",
    # of the arena
    "fault": "a fault begins or is over", "exit": "a process has ended",
}  # fmt: skip


class Line(Struct, omit_defaults=True):
    """A step; its details depend on its kind."""

    what: str
    at: int = 0
    process: str = ""
    action: str = ""
    events: list[str] = []
    run: int = 0
    """The number of one call of a handler for one event, or of one statement that writes outcomes."""
    call: int = 0
    """The number of a call for several events, or of the calls for parts of them after the call has failed."""
    event: str = ""
    notification: str = ""
    handler: str = ""
    partition: int = 0
    slot: str = ""
    """The slot of the run, if the handler was renamed since the notification was made."""
    key: str = ""
    sequence: int = 0
    attempt: int = 0
    term: int = 0
    decided: int = 0
    """When the dispatcher decided to start a run."""
    until: int = 0
    lock: str = ""
    locks: list[str] = []
    state: str = ""
    rows: list[tuple[str, str, int]] = []
    """Of outcomes: notification, slot, term; the term is 0 if the transaction is the fence."""
    number: int = 0
    counters: dict[str, int] = {}
    how: str = ""
    """A description for readers."""


_encode = msgspec.json.Encoder().encode


class History:
    """Appends the lines of a process."""

    def __init__(self, folder: Path, process: str) -> None:
        self._process = process
        self._file = os.open(folder / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **details: Any) -> None:
        line = Line(what, time.monotonic_ns(), self._process, **details)
        os.write(self._file, _encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def keep_log(folder: Path, process: str) -> None:
    """Write the log and the warnings of this process into a file beside its history."""
    os.dup2(os.open(folder / f"{process}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def read(folder: Path) -> list[Line]:
    """The lines of all processes, in chronological order."""
    return sorted(_lines(folder.glob("*.jsonl")), key=lambda line: line.at)


def _lines(files: Iterable[Path]) -> Iterable[Line]:
    decode = msgspec.json.Decoder(Line).decode
    for file in files:
        yield from map(decode, file.read_bytes().splitlines())
