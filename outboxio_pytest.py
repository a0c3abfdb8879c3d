"""The pytest plugin of outboxio: fixtures for an in-memory outbox, its clock, and the events that a test emits; and
``@pytest.mark.simulate``, which runs a test as the scenario of a simulation.

pytest imports this module in every test run, even if no fixture of outboxio is used. That is why it is not part of the
package, and imports the package only inside fixtures. docs/how-to/testing.md describes the fixtures.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from outboxio import Handlers, Outbox
    from outboxio.outbox import Drained
    from outboxio.testing import Drain, EmittedEvents, MovableClock, SimulationFailed

SEEDS = 200


@pytest.fixture
def outbox_clock() -> MovableClock:
    """The clock of ``outbox_for_tests``, which only the test advances."""
    from outboxio.testing import MovableClock

    return MovableClock()


@pytest.fixture
def outbox_under_test() -> Outbox | Handlers | None:
    """Override this fixture to return your ``Handlers()``, or your own outbox.

    The default is ``None``: an in-memory outbox without handlers.
    """
    return None


@pytest.fixture
def outbox_resources() -> Any:
    """Override this fixture to return the ``resources=`` of the in-memory outbox, such as fakes by type."""
    return None


@pytest.fixture
def outbox_for_tests(
    request: pytest.FixtureRequest,
    outbox_under_test: Outbox | Handlers | None,
    outbox_resources: Any,
    outbox_clock: MovableClock,
) -> Iterator[Outbox]:
    """The migrated outbox of the test: in-memory with your handlers, or the one returned by ``outbox_under_test``.

    An outbox that is not in use yet is migrated here, and closed after the test.
    """
    _refuse_trio(request)
    from outboxio import Outbox
    from outboxio.testing import any_loop

    outbox = outbox_under_test
    if not isinstance(outbox, Outbox):
        handlers, outbox = outbox, Outbox("sqlite://", namespace="test", clock=outbox_clock, resources=outbox_resources)
        if handlers is not None:
            outbox.include(handlers)
    if not any_loop.is_unused(outbox):
        yield outbox  # another fixture has migrated the outbox, and closes it
        return
    any_loop.prepare(outbox)
    try:
        yield outbox
    finally:
        any_loop.close(outbox)


@pytest.fixture
def outbox_drain(outbox_for_tests: Outbox) -> Drain:
    """``await outbox_drain()`` handles all due events of ``outbox_for_tests``, and raises the errors of handlers."""
    from outboxio.testing import drain

    async def drain_outbox(timeout: float | str | None = "10s") -> Drained:
        return await drain(outbox_for_tests, timeout)

    return drain_outbox


@pytest.fixture
def outbox_events() -> Iterator[EmittedEvents]:
    """The events that the test emits, in any outbox: ``outbox_events.of(OrderPaid).one()``."""
    from outboxio.testing import watch_events

    with watch_events() as events:
        yield events


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("outboxio").addoption(
        "--simulation-seed", type=int, metavar="SEED", help="run tests with the mark simulate with this seed only"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"simulate(seeds={SEEDS}, faults=True): run an `async def test_...(world)` once for each seed (a number of "
        "seeds, or the seeds), in simulated processes (outboxio)",
    )


@pytest.fixture
def world(request: pytest.FixtureRequest) -> None:
    """The ``World`` of a test with the mark ``simulate``, a new one for each seed."""
    if not isinstance(request.node, _Simulated):
        pytest.fail("the fixture `world` is for tests with @pytest.mark.simulate", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Collect tests with the mark ``simulate``, regardless of what other plugins do with async functions."""
    made = yield
    items: Any = made
    return [_simulated(each) for each in items] if isinstance(made, list) else made


def _simulated(item: Any) -> Any:
    if not isinstance(item, pytest.Function) or item.get_closest_marker("simulate") is None:
        return item
    kind: Any = _Simulated
    source: Any = item
    return kind.from_parent(
        source.parent, name=source.name, callspec=getattr(source, "callspec", None), fixtureinfo=source._fixtureinfo,
        keywords=source.keywords, originalname=source.originalname,
    )  # fmt: skip


class _Simulated(pytest.Function):
    """A test that is the scenario of a simulation. Its other fixtures are set up once for all seeds."""

    failed: SimulationFailed | None = None

    def runtest(self) -> None:
        from outboxio.testing import SimulationFailed, World, simulate

        names = self._fixtureinfo.argnames
        if not inspect.iscoroutinefunction(self.obj) or "world" not in names:
            pytest.fail("a test with @pytest.mark.simulate must be `async def test_...(world)`", pytrace=False)
        fixtures = {name: self.funcargs[name] for name in names if name != "world"}

        async def scenario(world: World) -> None:
            await self.obj(world=world, **fixtures)

        seeds, faults = self._options(**self.get_closest_marker("simulate").kwargs)  # type: ignore[union-attr]
        try:
            simulate(scenario, seeds=seeds, faults=faults)
        except SimulationFailed as failed:
            self.failed = failed
        if self.failed is not None:
            raise self.failed.__cause__ or self.failed

    def report(self) -> str:
        """Describe the failed seed."""
        failed = self.failed
        assert failed is not None
        repeat = f"Repeat it: pytest {shlex.quote(self.nodeid)} --simulation-seed {failed.seed}"
        return "\n\n".join(part for part in (failed.events, failed.notice, repeat) if part)

    def _options(self, seeds: Any = SEEDS, faults: bool = True) -> tuple[Any, bool]:
        seed = self.config.getoption("--simulation-seed")
        if seed is not None:
            return [seed], faults
        return range(seeds) if isinstance(seeds, int) else seeds, faults


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the emitted events, or what happened in a simulation, below the traceback of a failed test."""
    report = yield
    events = getattr(item, "funcargs", {}).get("outbox_events")
    if report.failed and report.when == "call" and events is not None:
        report.sections.append(("outbox events", events.summary()))
    if report.failed and isinstance(item, _Simulated) and item.failed is not None:
        report.sections.append(("simulation", item.report()))
    return report


def _refuse_trio(request: pytest.FixtureRequest) -> None:
    """Fail tests that anyio's plugin runs on trio, as it does by default: outboxio supports only asyncio."""
    if "anyio_backend" not in request.fixturenames:
        return
    backend = request.getfixturevalue("anyio_backend")
    if (backend if isinstance(backend, str) else backend[0]) != "asyncio":
        pytest.fail(
            "outboxio runs on asyncio, and this test runs on trio: define a fixture `anyio_backend` that returns "
            '"asyncio"',
            pytrace=False,
        )
