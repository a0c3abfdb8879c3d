"""The scenarios of the gate, in one table."""

from __future__ import annotations

from collections.abc import Mapping

from outboxio import Batch, RetryPolicy
from outboxio.testing.simulation.faults import USUAL
from tests.chaos.handlers import Followed, Kind
from tests.simulation.application import Backlog, Scenario
from tests.simulation.deployments import HappenedNow, Leaving, Rolling, Versions
from tests.simulation.features import Inbox, Jobs, Locks
from tests.simulation.operated import Drained, Operated

SOON = {"retry": RetryPolicy(base="50ms", factor=1)}
LATER = {"retry": RetryPolicy(base="150ms", factor=1)}
FEW = {"retry": RetryPolicy(base="50ms", factor=1, max_attempts=3)}
ORDERED = SOON | {"ordered": True, "on_dead_key": "continue"}
TRANSACTIONAL = SOON | {"delivery": "transactional"}
ONCE = {"delivery": "at_most_once"}
BATCH = Batch(size=4, max_wait="50ms")

Kinds = Mapping[str, Kind]

PLAIN: Kinds = {"plain": Kind(options=SOON), "flaky": Kind(options=FEW, fails=0.3, dies=0.05)}
ORDERED_ONE: Kinds = {"ordered": Kind(options=ORDERED, fails=0.2, dies=0.03)}
IN_TRANSACTIONS: Kinds = {
    "counts": Kind(options=TRANSACTIONAL, fails=0.15),
    "ordered-counts": Kind(options=TRANSACTIONAL | ORDERED, fails=0.15),
}
BATCHES: Kinds = {
    "batch": Kind(options=SOON | {"batch": BATCH}, fails=0.1, returns=0.1),
    "batch-counts": Kind(options=TRANSACTIONAL | {"batch": BATCH}, fails=0.1, returns=0.1),
}
BEHIND: Kinds = {"ordered-batch": Kind(options=ORDERED | {"batch": BATCH, "concurrency": 1}, sleeps=0.03, fails=0.1)}
PRIORITIES: Kinds = {
    "first": Kind(options=SOON | {"priority": 10, "concurrency": 2}, sleeps=0.3),
    "last": Kind(options=SOON | {"priority": -10, "concurrency": 1}, fails=0.2),
}
CHAINED: Kinds = {
    "emits": Kind(options=SOON, emits=True, fails=0.1),
    "follows": Kind(event=Followed, options=SOON),
}
HOOKS: Kinds = {
    "hooked": Kind(options=FEW, fails=0.5, dies=0.1, hook_fails=0.2),
    "hooked-once": Kind(options=ONCE, fails=0.3, hook_fails=0.2),
    "ordered-hooked": Kind(options=ORDERED | FEW, fails=0.5, hook_fails=0.2),
    "counts-hooked": Kind(options=TRANSACTIONAL | FEW, fails=0.5, hook_fails=0.2),
}
OPERATED: Kinds = {
    "operated": Kind(options=FEW, fails=0.4),
    "operated-counts": Kind(options=TRANSACTIONAL | FEW, fails=0.3),
    "parked": Kind(options=FEW | {"ordered": True}, fails=0.4),
}
DRAINED: Kinds = {"plain": Kind(options=SOON), "flaky": Kind(options=SOON, fails=0.2)}
ROLLED: Kinds = {
    "plain": Kind(options=SOON | {"aliases": {"plain"}}, fails=0.1, name="renamed"),
    "counts": Kind(options=TRANSACTIONAL | {"aliases": {"counts"}}, fails=0.1, name="renamed-counts"),
    "ordered": Kind(options=ORDERED, fails=0.1),
    "added": Kind(options=SOON, is_everywhere=False),
}
LONG: Kinds = {
    "long": Kind(options=SOON, sleeps=0.5, is_steady=True),
    "flaky": Kind(options=LATER, sleeps=0.5, is_steady=True, fails=0.3),
    "ordered": Kind(options=ORDERED, sleeps=0.1, is_steady=True, fails=0.1),
}
VERSIONED: Kinds = {
    "plain": Kind(event=HappenedNow, options=SOON),
    "counts": Kind(event=HappenedNow, options=TRANSACTIONAL),
    "ordered": Kind(event=HappenedNow, options=ORDERED),
}

ONE: Kinds = {"plain": Kind(options=SOON)}
OF_PROCESSES = ("kill", "kill", "freeze", "slow", "leave")
STEADY_CLOCK = tuple(kind for kind in USUAL if kind != "clock jumps")
SILENCE = 1.8  # heartbeats of a second after which a server takes locks from an unresponsive process

SCENARIOS: Mapping[str, Scenario] = {
    "plain": Scenario(PLAIN),
    "ordered": Scenario(ORDERED_ONE),
    "transactional": Scenario(IN_TRANSACTIONS),
    "once": Scenario({"once": Kind(options=ONCE, fails=0.1)}),
    "batches": Scenario(BATCHES),
    "ordered-batches": Scenario({"ordered-batch": Kind(options=ORDERED | {"batch": BATCH}, fails=0.2, returns=0.2)}),
    "ordered-backlog": Scenario(BEHIND, Backlog),
    "priorities": Scenario(PRIORITIES),
    "chained": Scenario(CHAINED),
    "hooks": Scenario(HOOKS),
    "operators": Scenario(OPERATED, Operated),
    "drain": Scenario(DRAINED, Drained, faults=()),
    "drain-with-faults": Scenario(DRAINED, Drained, faults=OF_PROCESSES),
    "jobs": Scenario(ONE, Jobs, faults=STEADY_CLOCK),  # a job does not run for hours if the clock is set back
    "locks": Scenario(ONE, Locks),
    "inbox": Scenario(ONE, Inbox),
    "versions": Scenario(VERSIONED, Versions),
    "rolling": Scenario(ROLLED, Rolling),
    "leaving": Scenario(LONG, Leaving),
    "fenced-plain": Scenario(PLAIN, lock_silence=SILENCE),
    "fenced-ordered": Scenario(ORDERED_ONE, lock_silence=SILENCE),
    "fenced-priorities": Scenario(PRIORITIES, lock_silence=SILENCE),
    "fenced-transactional": Scenario(IN_TRANSACTIONS, lock_silence=SILENCE),
    "fenced-chained": Scenario(CHAINED, lock_silence=SILENCE),
    "fenced-jobs": Scenario(ONE, Jobs, faults=STEADY_CLOCK, lock_silence=SILENCE),
}
