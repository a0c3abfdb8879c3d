"""The pytest plugin of outboxio: fixtures for an outbox in memory, its clock, and the events that a test emits.

pytest imports this module in every test run, also in runs that use no fixture of outboxio. So this module is apart from
the package, and imports the package inside of fixtures only. docs/how-to/testing.md describes the fixtures.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from outboxio import Handlers, Outbox
    from outboxio.outbox import Drained
    from outboxio.testing import Drain, EmittedEvents, MovableClock


@pytest.fixture
def outbox_clock() -> MovableClock:
    """The clock of ``outbox_for_tests``: stands still until the test moves it."""
    from outboxio.testing import MovableClock

    return MovableClock()


@pytest.fixture
def outbox_under_test() -> Outbox | Handlers | None:
    """Override this fixture: return your ``Handlers()``, or an outbox of your own.

    The default is ``None``: an outbox in memory without handlers.
    """
    return None


@pytest.fixture
def outbox_resources() -> Any:
    """Override this fixture: the ``resources=`` of the outbox in memory, such as fakes by type."""
    return None


@pytest.fixture
def outbox_for_tests(
    request: pytest.FixtureRequest,
    outbox_under_test: Outbox | Handlers | None,
    outbox_resources: Any,
    outbox_clock: MovableClock,
) -> Iterator[Outbox]:
    """The outbox of the test, with tables: in memory with your handlers, or the outbox of ``outbox_under_test``.

    An outbox that is not in use yet gets its tables here, and is closed after the test.
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
        yield outbox  # a fixture of the application has made the tables, and closes the outbox
        return
    any_loop.prepare(outbox)
    try:
        yield outbox
    finally:
        any_loop.close(outbox)


@pytest.fixture
def outbox_drain(outbox_for_tests: Outbox) -> Drain:
    """``await outbox_drain()``: handle all due events of ``outbox_for_tests``, and raise the errors of handlers."""
    from outboxio.testing import drain

    async def drain_outbox(timeout: float | str | None = "10s") -> Drained:
        return await drain(outbox_for_tests, timeout)

    return drain_outbox


@pytest.fixture
def outbox_events() -> Iterator[EmittedEvents]:
    """The events that are emitted in the test, in any outbox: ``outbox_events.of(OrderPaid).one()``."""
    from outboxio.testing import watch_events

    with watch_events() as events:
        yield events


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the emitted events below the traceback of a failed test."""
    report = yield
    events = getattr(item, "funcargs", {}).get("outbox_events")
    if report.failed and report.when == "call" and events is not None:
        report.sections.append(("outbox events", events.told()))
    return report


def _refuse_trio(request: pytest.FixtureRequest) -> None:
    """outboxio runs on asyncio: anyio's plugin runs each test on each backend by default."""
    if "anyio_backend" not in request.fixturenames:
        return
    backend = request.getfixturevalue("anyio_backend")
    if (backend if isinstance(backend, str) else backend[0]) != "asyncio":
        pytest.fail(
            "outboxio runs on asyncio, and this test runs on trio: define a fixture `anyio_backend` that returns "
            '"asyncio"',
            pytrace=False,
        )
