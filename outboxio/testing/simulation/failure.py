"""The error of a simulation, as a person reads it: what is wrong, what happened before, and how to repeat it."""

from __future__ import annotations

NOTED = " ** "
"""Marks the lines of a trace that are no steps: starts, faults and kills of processes, and outcomes of handlers."""
MOST_LINES = 40


class SimulationFailed(AssertionError):
    """A scenario has failed, or a promise of outboxio was broken.

    ``seed`` repeats the failure: ``simulate(scenario, seeds=[seed])``. ``trace`` has a line for each step, with the
    virtual time in seconds, the number of the step, the process and the callback. The message has the lines about
    faults, kills and outcomes.
    """

    def __init__(self, seed: int, why: str, trace: list[str], repeat: str, notice: str = "") -> None:
        """``repeat``: the call that repeats the failure. ``notice``: why it may not be repeated."""
        super().__init__(seed, why, trace, repeat, notice)
        self.seed, self.why, self.trace, self.repeat, self.notice = seed, why, trace, repeat, notice

    def __str__(self) -> str:
        parts = self.why, self.events, self.notice, f"Repeat it: {self.repeat}"
        return "\n\n".join(part for part in parts if part)

    @property
    def events(self) -> str:
        """What happened with this seed, a line for each event."""
        found = [_columns(*line.split(NOTED, 1)) for line in self.trace if NOTED in line]
        skipped = len(found) - MOST_LINES
        if skipped > 0:
            found[: skipped + 1] = [f"  ... {skipped + 1} lines more are in the trace"]
        return "\n".join([f"With seed {self.seed}, by virtual seconds:", *found])


def noted(time: float, step: int, process: str, what: str) -> str:
    """A line of the trace."""
    return f"{time:11.6f} {step:6d} {process:12} {what}"


def merged(trace: list[str], others: list[str]) -> list[str]:
    """The lines of both, in the order of the steps."""
    return sorted([*trace, *others], key=lambda line: int(line[12:18]))


def _columns(head: str, what: str) -> str:
    time, _, process = head.split(None, 2)
    return f"  {float(time):8.3f}  {process.strip():12} {what}"
