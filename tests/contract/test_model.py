"""Steps of an application, its operator and the clock in any order: the database matches the model.

Hypothesis generates the steps. After each step every notification is compared (state, attempts, errors, next due time),
and so are the called handlers. A failure is shortened to the fewest steps, printed as a list of calls, and repeated in
the next run (see ``properties.py`` for more examples than usual).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

import pytest
from hypothesis import seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from outboxio import (
    Batch,
    Event,
    EventEnvelope,
    Outbox,
    RetryAfter,
    RetryPolicy,
    Settings,
    UnknownHandler,
    Unprocessable,
)
from outboxio.testing import MovableClock
from tests.kit import model
from tests.kit.app import Look
from tests.kit.model import ROLES, Deployed, Fact, Model, Owed, Role
from tests.kit.properties import EXAMPLES
from tests.kit.server_actions import actions_on

pytestmark = pytest.mark.one_of_family

START = datetime(2030, 1, 1, 12)
SETTINGS = Settings(
    handling_retention_window=model.RETENTION,
    subscription_ttl=model.TTL,
    keep_finished=model.KEEP_FINISHED,
    keep_dead=timedelta(days=36_500),  # whether a DEAD row parks its key is not decided when it is purged
    dedup_retention=timedelta(days=36_500),
)

NAMES = sorted(role.stored_as(number) for role in ROLES.values() for number in range(2))
ALWAYS_THERE = "ledger"  # while a process has the key, it does not matter which of its rows are BLOCKED


class Opened(Event):
    number: int


class Closed(Event):
    number: int


TYPES = {"Opened": Opened, "Closed": Closed}


Step = tuple[str, dict[str, Any]]


def steps() -> st.SearchStrategy[Step]:
    """A step and its arguments. Steps with an effect are more frequent."""
    name, ago = st.sampled_from(NAMES), st.sampled_from([0, 600, 10**7])
    some = st.sets(st.integers(0, 40), min_size=1, max_size=6)
    arguments: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {
        "emit": (
            5,
            {
                "type": st.sampled_from(sorted(TYPES)),
                "key": st.sampled_from([None, "k1", "k2"]),
                "topic": st.sampled_from([None, None, "news"]),
                "delay": st.sampled_from([0, 0, 0, 3600]),
                "fate": st.sampled_from(["fine", "fails", "fails twice", "hopeless", "later", "counted"]),
                "victims": st.sets(st.sampled_from(sorted(ROLES)), max_size=3) | st.just(set(ROLES)),
                "times": st.integers(1, 3),
            },
        ),
        "drain": (6, {}),
        "let_time_pass": (4, {"delta": st.sampled_from(["10s", "30s", "5m", "30m", "3h", "2d", "8d"])}),
        "deploy": (1, {"roles": st.sets(st.sampled_from(sorted(ROLES)))}),
        "rename": (3, {"role": st.sampled_from(sorted(ROLES)), "number": st.integers(0, 1)}),
        "retry": (2, {"some": some}),
        "skip": (1, {"some": some}),
        "resume": (1, {"name": st.sampled_from(["ledger", "ledger-1", "mail"]), "key": st.sampled_from(["k1", "k2"])}),
        "replay": (1, {"name": name, "states": st.sets(st.sampled_from(model.TERMINAL), min_size=1), "ago": ago}),
        "backfill": (2, {"name": name, "ago": ago}),
        "pause": (2, {"name": name}),
        "unpause": (1, {"name": name}),
        "unsubscribe": (1, {"name": st.sampled_from([n for n in NAMES if not n.startswith(ALWAYS_THERE)])}),
        "purge": (1, {}),
    }
    often = [step for step, (weight, _) in arguments.items() for _ in range(weight)]
    return st.sampled_from(often).flatmap(
        lambda step: st.tuples(st.just(step), st.fixed_dictionaries(arguments[step][1]))
    )


class ExampleDatabase:
    """A database for all examples of a test, emptied for each one."""

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self.url = url
        self.runner = runner
        self._look = Look(url)
        self.database: Any = url
        self._ends = AsyncExitStack()
        self._is_file = urlsplit(url).scheme == "sqlite"

    async def open(self) -> None:
        async with Outbox(self.url, namespace="first") as outbox:
            await outbox.migrate()
        if not self._is_file:  # a given pool keeps its connections from one drain to the next
            self.database = await self._ends.enter_async_context(actions_on(self.url).pool(12))

    async def clear(self) -> None:
        for table in ("event_notifications", "events", "subscriptions", "pauses"):
            await self._look.fetch(f"DELETE FROM {{{table}}}")

    async def close(self) -> None:
        await self._ends.aclose()


@pytest.fixture
def example_database(database_url: str) -> Iterator[ExampleDatabase]:
    with asyncio.Runner() as runner:
        example_database = ExampleDatabase(database_url, runner)
        runner.run(example_database.open())
        logging.disable(logging.CRITICAL)  # handlers fail on purpose, by the thousand
        try:
            yield example_database
        finally:
            logging.disable(logging.NOTSET)
            runner.run(example_database.close())


class Steps(RuleBasedStateMachine):
    """The available steps."""

    def __init__(self, example_database: ExampleDatabase) -> None:
        super().__init__()
        self.example_database = example_database
        self.clock = MovableClock(START)
        self.model = Model(now=START)
        self.facts: dict[int, Fact] = {}
        self.ids: dict[tuple[int, str], Any] = {}
        self.runs: list[tuple[str, int]] = []
        self.called = {role: Deployed(role) for role in ROLES}
        self.outbox: Outbox | None = None
        self.wait_for(example_database.clear())
        self._deploy(set(ROLES))

    def wait_for(self, work: Any) -> Any:
        async def in_time() -> Any:
            async with asyncio.timeout(30):
                return await work

        return self.example_database.runner.run(in_time())

    # A single rule: with several, Hypothesis omits some from each example, and most would lack events or a drain.
    @rule(step=steps())
    def do(self, step: Step) -> None:
        name, arguments = step
        getattr(self, name)(**arguments)

    # --- the application -----------------------------------------------------------------------

    def emit(
        self, type: str, key: str | None, topic: str | None, delay: int, fate: str, victims: set[str], times: int
    ) -> None:
        now = self.model.now
        for _ in range(times):
            fact = Fact(
                len(self.facts), type, key, topic, now, now + timedelta(seconds=delay), fate, frozenset(victims)
            )
            self.facts[fact.number] = fact
            self.model.undelivered.append(fact)
            self.wait_for(self._emit(fact))

    async def _emit(self, fact: Fact) -> None:
        assert self.outbox is not None
        async with self.outbox.transaction("Emit") as tx:
            tx.emit(
                TYPES[fact.type](fact.number), ordering_key=fact.key, topic=fact.topic, available_at=fact.available_at
            )

    def deploy(self, roles: set[str]) -> None:
        self._deploy(roles | {ALWAYS_THERE})

    def rename(self, role: str, number: int) -> None:
        self.called[role] = self.called[role].renamed(ROLES[role].stored_as(number))
        self._deploy({*self.model.deployed, role})

    def _deploy(self, roles: set[str]) -> None:
        """A new version of the application replaces the previous one."""
        if self.outbox is not None:
            self.wait_for(self.outbox.close())
        self.model.deployed = {role: self.called[role] for role in sorted(roles)}
        self.outbox = Outbox(
            self.example_database.database, namespace="app", settings=SETTINGS, clock=self.clock
        )  # fmt: skip
        self.outbox.register(*TYPES.values())
        for name, deployed in self.model.deployed.items():
            self._register(self.outbox, ROLES[name], deployed)

    def _register(self, outbox: Outbox, role: Role, deployed: Deployed) -> None:
        async def handle(envelope: EventEnvelope[Any]) -> None:
            if (error := self._meet(role, envelope)) is not None:
                raise error

        async def handle_all(envelopes: list[EventEnvelope[Any]]) -> list[tuple[EventEnvelope[Any], BaseException]]:
            met = [(envelope, self._meet(role, envelope)) for envelope in envelopes]
            return [(envelope, error) for envelope, error in met if error is not None]

        async def hook(envelope: EventEnvelope[Any], error: BaseException) -> None: ...

        options: dict[str, Any] = {"ordered": role.ordered, "delivery": role.delivery}
        if role.delivery != "at_most_once":
            options["retry"] = RetryPolicy(max_attempts=role.max_attempts, jitter=0, retention=role.retention)
        if role.batch:
            options["batch"] = Batch(size=3, max_wait=0)
        if role.hook:
            options["on_dead"] = hook
        outbox.handler(
            *(TYPES[each] for each in role.types),
            name=deployed.name, aliases=deployed.aliases, topic=role.topic or None, **options,
        )(handle_all if role.batch else handle)  # fmt: skip

    def _meet(self, role: Role, envelope: EventEnvelope[Any]) -> BaseException | None:
        event = envelope.event
        number: int = event["number"] if isinstance(event, dict) else event.number
        self.runs.append((role.name, number))
        fate = model.fate_of(role.name, self.facts[number], envelope.attempt, self.clock.now())
        return {
            "fine": lambda: None,
            "fails": lambda: ValueError("it fails"),
            "hopeless": lambda: Unprocessable("it is hopeless"),
            "later": lambda: RetryAfter(model.LATER, count_attempt=False),
            "counted": lambda: RetryAfter(model.COUNTED),
        }[fate]()

    def drain(self) -> None:
        assert self.outbox is not None
        self.model.drain()
        self.wait_for(self.outbox.drain("25s"))
        assert Counter(self.runs) == Counter(self.model.runs)

    def let_time_pass(self, delta: str) -> None:
        self.model.now = self.clock.advance(delta)

    # --- the operator --------------------------------------------------------------------------

    def _chosen(self, some: set[int]) -> list[Owed]:
        rows = sorted(self.model.owed)
        if not rows:
            return []
        return [self.model.owed[at] for at in sorted({rows[number % len(rows)] for number in some})]

    def _operate(self, work: Any, expected: object) -> None:
        answer = self.wait_for(work)
        assert answer == expected

    def _operate_on(self, name: str, work: Any, expected: object, *, among_rows: bool = False) -> None:
        """An operation that matches no row is refused if the name is unknown."""
        if expected or self.model.knows(name, among_rows=among_rows):
            self._operate(work, expected)
        else:
            with pytest.raises(UnknownHandler):
                self.wait_for(work)

    @property
    def admin(self) -> Any:
        assert self.outbox is not None
        return self.outbox.admin

    def retry(self, some: set[int]) -> None:
        rows = self._chosen(some)
        self._operate(done(self.admin.retry([self._id(row) for row in rows])), self.model.retry(rows))

    def skip(self, some: set[int]) -> None:
        rows = self._chosen(some)
        self._operate(done(self.admin.skip([self._id(row) for row in rows])), self.model.skip(rows))

    def resume(self, name: str, key: str) -> None:
        resumed = self.admin.resume(name, key)
        self._operate_on(name, resumed, self.model.resume(name, key), among_rows=True)

    def replay(self, name: str, states: set[str], ago: int) -> None:
        since = self.model.now - timedelta(seconds=ago)
        replayed = self.model.replay(name, since, states)
        self._operate_on(name, self.admin.replay(name, since, states=states), replayed, among_rows=True)

    def backfill(self, name: str, ago: int) -> None:
        since = self.model.now - timedelta(seconds=ago)
        self._operate_on(name, self.admin.backfill(name, since), self.model.backfill(name, since))

    def pause(self, name: str) -> None:
        self._operate_on(name, self.admin.pause(name), None)
        if self.model.knows(name):
            self.model.pause(name)

    def unpause(self, name: str) -> None:
        self._operate_on(name, self.admin.unpause(name), self.model.unpause(name))

    def unsubscribe(self, name: str) -> None:
        self._operate_on(name, self.admin.unsubscribe(name), self.model.unsubscribe(name))

    def purge(self) -> None:
        removed = self.wait_for(self.admin.purge())
        assert (removed.notifications, removed.events) == self.model.purge()

    # --- what is compared ----------------------------------------------------------------------

    @invariant()
    def the_database_matches_the_model(self) -> None:
        rows = self.wait_for(self.admin.list(limit=100_000))
        self.ids = {(row.payload["number"], row.handler_name): row.id for row in rows}

        found = {(row.payload["number"], row.handler_name): _as_found(row) for row in rows}
        assert found == {at: _as_expected(row) for at, row in self.model.owed.items()}

        counts = self.wait_for(self.admin.counts())
        waiting = sum(counts.pop(state) for state in ("PENDING", "FAILED", "BLOCKED", "DYING"))
        assert {"waiting": waiting, **counts} == self.model.counts()
        assert sum(self.wait_for(self.admin.waiting()).values()) == waiting

    def _id(self, row: Owed) -> Any:
        return self.ids[row.fact.number, row.handler_name]

    def teardown(self) -> None:
        if self.outbox is not None:
            self.wait_for(self.outbox.close())


Compared = tuple[str, int, int, datetime | None, datetime | None]


async def done(operation: Any) -> int:
    """The number of rows changed by an operation."""
    return int((await operation).done)


def _as_found(row: Any) -> Compared:
    is_ordered = row.handler_name.startswith(ALWAYS_THERE)
    state = "WAITING" if is_ordered and row.state in ("PENDING", "FAILED", "BLOCKED") else str(row.state)
    waits = row.state not in model.TERMINAL
    return (
        state, row.attempts, len(row.errors), row.next_retry_at if waits else None,
        None if is_ordered else row.retention_from,
    )  # fmt: skip


def _as_expected(row: Owed) -> Compared:
    waits = row.state in model.WAITING
    state = "WAITING" if row.is_ordered and waits else row.state
    due = row.due if waits else None
    return state, row.attempts, row.errors, due, None if row.is_ordered else row.retention_from


@pytest.mark.slow
def test_the_database_matches_the_model_after_every_step(example_database: ExampleDatabase) -> None:
    # The @reproduce_failure that a failure prints goes here.
    def machine() -> Steps:
        return Steps(example_database)

    # Each dialect has examples of its own, so all dialects together try more of them.
    seed(crc32(urlsplit(example_database.url).scheme.encode()))(machine)
    run_state_machine_as_test(
        machine,
        settings=hypothesis_settings(max_examples=int(EXAMPLES or 5), stateful_step_count=40),
    )
