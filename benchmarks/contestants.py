"""Who takes part: outboxio, the bare pipelines, and the peers; what each promises, and how a run of it is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.peers import PEERS, install
from benchmarks.scenarios import Scenario, Setting
from benchmarks.task import Task


class Contestant(Struct, frozen=True):
    """One of those who are compared."""

    name: str
    label: str
    kind: str
    """``ours``, ``bare`` or ``peer``."""
    promises: str
    dialects: frozenset[str]
    command: Callable[[Task], Sequence[str]]
    takes_part: Callable[[Scenario, Setting], bool]
    why_not: str = ""
    """Why it cannot take part at all; empty if it can."""


def _here(task: Task) -> Sequence[str]:
    return [sys.executable, "-m", "benchmarks.run", task.as_argument()]


def _elsewhere(command: Sequence[str], variant: str, task: Task) -> Sequence[str]:
    return [*command, replace(task, options={**task.options, "variant": variant}).as_argument()]


_EVERYWHERE = frozenset({"postgres", "mysql", "mariadb", "sqlite"})

OURS = (
    Contestant(
        "outboxio",
        "outboxio",
        "ours",
        "two stages, full context in each row, fenced outcomes; rows are kept",
        _EVERYWHERE,
        _here,
        lambda scenario, setting: True,
    ),
    Contestant(
        "bare",
        "bare",
        "bare",
        "two stages, full context in each row; no locks, retries, errors or timeouts",
        _EVERYWHERE,
        _here,
        lambda scenario, setting: "bare" in scenario.contestants and setting.bare,
    ),
    Contestant(
        "bare-plain",
        "bare, one loop",
        "bare",
        "the same, as one writes it first: find, a task for each row, settle",
        _EVERYWHERE,
        lambda task: _here(Task("drain", "bare", task.dialect, task.url, {**task.options, "plain": True})),
        lambda scenario, setting: "bare-plain" in scenario.contestants and setting.peers,
    ),
    Contestant(
        "by-hand",
        "by hand, same rows",
        "bare",
        "a transaction written by hand that writes the very rows of outboxio into its table",
        _EVERYWHERE,
        _here,
        lambda scenario, setting: "by-hand" in scenario.contestants,
    ),
    Contestant(
        "one-visit",
        "by hand, one visit to the thread",
        "bare",
        "the same rows, the whole transaction as one function in the thread that writes, where no coroutine can be",
        frozenset({"sqlite"}),
        _here,
        lambda scenario, setting: "one-visit" in scenario.contestants,
    ),
)


def everybody(*, with_peers: bool, say: Callable[[str], None]) -> list[Contestant]:
    """All that can take part; peers are installed if they are not yet, and those that cannot be say why."""
    found = list(OURS)
    for peer in PEERS if with_peers else ():
        installed = install(peer, say)
        found.append(
            Contestant(
                peer.contestant,
                peer.label,
                "peer",
                f"{peer.promises}; {peer.settings}",
                frozenset({"postgres"}),
                partial(_elsewhere, installed.command, peer.variant),
                lambda scenario, setting: setting.peers,
                installed.why_not,
            )
        )
    return found
