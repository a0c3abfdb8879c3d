"""The contestants: outboxio, the bare pipelines and the peers, with their guarantees and commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.peers import PEERS, install
from benchmarks.scenarios import EVERYWHERE, Scenario, Setting
from benchmarks.task import Task


class Contestant(Struct, frozen=True):
    """A contestant of the comparison."""

    name: str
    label: str
    kind: str
    """``ours``, ``bare`` or ``peer``."""
    promises: str
    dialects: Sequence[str]
    command: Callable[[Task], Sequence[str]]
    takes_part: Callable[[Scenario, Setting], bool]
    why_not: str = ""
    """Why it cannot take part; empty if it can."""


def _here(task: Task) -> Sequence[str]:
    return [sys.executable, "-m", "benchmarks.run", task.as_argument()]


def _elsewhere(command: Sequence[str], variant: str, task: Task) -> Sequence[str]:
    if "processes" in task.options:  # started and measured like our own processes
        return _here(replace(task, options={**task.options, "command": command}))
    return [*command, replace(task, options={**task.options, "variant": variant}).as_argument()]


OURS = (
    Contestant(
        "outboxio",
        "outboxio",
        "ours",
        "two stages, full context in each row, fenced outcomes; rows are kept",
        EVERYWHERE,
        _here,
        lambda scenario, setting: True,
    ),
    Contestant(
        "bare",
        "bare",
        "bare",
        "two stages, full context in each row; no locks, retries, errors or timeouts",
        EVERYWHERE,
        _here,
        lambda scenario, setting: "bare" in scenario.contestants and setting.bare,
    ),
    Contestant(
        "bare-plain",
        "bare, one loop",
        "bare",
        "the same in its simplest form: find, one task per row, settle",
        EVERYWHERE,
        lambda task: _here(Task("drain", "bare", task.dialect, task.url, {**task.options, "plain": True})),
        lambda scenario, setting: "bare-plain" in scenario.contestants and setting.peers,
    ),
    Contestant(
        "by-hand",
        "by hand, same rows",
        "bare",
        "a hand-written transaction that writes the same rows to outboxio's table",
        EVERYWHERE,
        _here,
        lambda scenario, setting: "by-hand" in scenario.contestants,
    ),
    Contestant(
        "one-visit",
        "by hand, one visit to the thread",
        "bare",
        "the same rows; the whole transaction is one function in the writing thread, where no coroutine can run",
        ("sqlite",),
        _here,
        lambda scenario, setting: "one-visit" in scenario.contestants,
    ),
)


def _peer_takes_part(in_processes: bool, scenario: Scenario, setting: Setting) -> bool:
    return setting.peers and (in_processes or scenario.name != "scale-beside")


def everybody(*, with_peers: bool, say: Callable[[str], None]) -> list[Contestant]:
    """Return all contestants. Install missing peers; a peer that cannot be installed has the reason in ``why_not``."""
    found = list(OURS)
    for peer in PEERS if with_peers else ():
        installed = install(peer, say)
        found.append(
            Contestant(
                peer.contestant,
                peer.label,
                "peer",
                f"{peer.promises}; {peer.settings}",
                ("postgres",),
                partial(_elsewhere, installed.command, peer.variant),
                partial(_peer_takes_part, peer.in_processes),
                installed.why_not,
            )
        )
    return found
