"""The pytest plugin in separate pytest runs: event loops of every kind, and failure messages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

APPLICATION = """
from outboxio import Action, Event, EventEnvelope, Handlers, Transaction

class OrderPaid(Event):
    order_id: int

class ReceiptSent(Event):
    order_id: int

class PayOrder(Action):
    order_id: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(OrderPaid(self.order_id), model_id=self.order_id, model_type="Order")

class Mailer:
    def __init__(self) -> None:
        self.sent = []

handlers = Handlers()

@handlers.handler(OrderPaid, name="receipt")
async def receipt(envelope: EventEnvelope[OrderPaid], mailer: Mailer) -> None:
    assert envelope.event.order_id > 0, "an order has a number"
    mailer.sent.append(envelope.event.order_id)
    envelope.emit(ReceiptSent(envelope.event.order_id))
"""

CONFTEST = """
import pytest
from application import Mailer, handlers

@pytest.fixture
def outbox_under_test():
    return handlers

@pytest.fixture
def outbox_resources():
    return {Mailer: Mailer()}
"""

PAYS = """
    await outbox_for_tests.executor.execute(PayOrder({number}), headers={{"user": "ada"}})
    assert outbox_events.of(OrderPaid) == [OrderPaid({number})]
    assert (await outbox_drain()).succeeded == 1
    assert outbox_resources[Mailer].sent == [{number}]
    assert outbox_events.of(ReceiptSent).one().order_id == {number}
"""
FIXTURES = "outbox_for_tests, outbox_events, outbox_drain, outbox_resources"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An application with handlers, whose tests run with the plugins that a run names."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(application=APPLICATION, conftest=CONFTEST)
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    return pytester


ASYNCIO = ("-p", "pytest_asyncio.plugin", "-o", "asyncio_default_fixture_loop_scope=function")


def run(project: pytest.Pytester, *arguments: str, plugin: tuple[str, ...] = ASYNCIO) -> pytest.RunResult:
    return project.runpytest_subprocess(*plugin, "-p", "outboxio_pytest", *arguments, timeout=120)


def a_test(name: str, mark: str = "", number: int = 7) -> str:
    return f"{mark}\nasync def test_{name}({FIXTURES}):{PAYS.format(number=number)}\n"


HEAD = "import pytest\nfrom application import *\n"


def test_the_fixtures_work_in_the_event_loops_of_pytest_asyncio(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_loops=HEAD
        + a_test("function", "@pytest.mark.asyncio")
        + a_test("module", "@pytest.mark.asyncio(loop_scope='module')", 8)
        + a_test("session", "@pytest.mark.asyncio(loop_scope='session')", 9)
        + a_test("session_again", "@pytest.mark.asyncio(loop_scope='session')", 10)
        + "\ndef test_without_a_loop(outbox_for_tests, outbox_clock):\n"
        "    import asyncio\n"
        "    asyncio.run(outbox_for_tests.executor.execute(PayOrder(1)))\n"
        "\n@pytest.mark.asyncio\nasync def test_asks_for_it_later(request):\n"
        "    outbox = request.getfixturevalue('outbox_for_tests')\n"
        "    await outbox.executor.execute(PayOrder(1))\n"
    )

    run(project, "--asyncio-mode=strict").assert_outcomes(passed=6)
    run(project, "--asyncio-mode=auto").assert_outcomes(passed=6)


def test_the_fixtures_work_in_anyio_on_asyncio_and_refuse_trio(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_anyio=HEAD
        + "\n@pytest.fixture(params=['asyncio', 'trio'])\ndef anyio_backend(request):\n    return request.param\n"
        + a_test("anyio", "@pytest.mark.anyio")
    )

    result = run(project, plugin=("-p", "anyio.pytest_plugin"))

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*outboxio runs on asyncio, and this test runs on trio*"])


def test_a_user_supplied_outbox_is_used_unchanged(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_own=HEAD
        + """
import pytest_asyncio
from outboxio import Outbox

class TestNew:
    @pytest.fixture
    def outbox_under_test(self, tmp_path, outbox_clock):
        url, resources = f"sqlite:///{tmp_path}/app.db", {Mailer: Mailer()}
        outbox = Outbox(url, namespace="shop", clock=outbox_clock, resources=resources)
        outbox.include(handlers)
        return outbox

    @pytest.mark.asyncio
    async def test_gets_its_tables(self, outbox_under_test, outbox_for_tests):
        assert outbox_for_tests is outbox_under_test
        await outbox_for_tests.executor.execute(PayOrder(1))

class TestInUse:
    @pytest_asyncio.fixture
    async def outbox_under_test(self, tmp_path):
        async with Outbox(f"sqlite:///{tmp_path}/app.db", namespace="shop") as outbox:
            await outbox.migrate()
            yield outbox
            await outbox.check()  # the plugin has not closed it

    @pytest.mark.asyncio
    async def test_stays_with_the_application(self, outbox_under_test, outbox_for_tests):
        assert outbox_for_tests is outbox_under_test
        await outbox_for_tests.executor.execute(PayOrder(1))
"""
    )

    run(project).assert_outcomes(passed=2)


def test_a_failure_shows_what_was_emitted(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_fails=HEAD
        + """
pytestmark = pytest.mark.asyncio

async def test_one(outbox_for_tests, outbox_events):
    await outbox_for_tests.executor.execute(PayOrder(7))
    outbox_events.of(ReceiptSent).one(order_id=7)

async def test_equal(outbox_for_tests, outbox_events):
    await outbox_for_tests.executor.execute(PayOrder(8))
    assert outbox_events.of(ReceiptSent) == [ReceiptSent(8)]

async def test_other_assertion(outbox_for_tests, outbox_events):
    await outbox_for_tests.executor.execute(PayOrder(9))
    assert 1 + 1 == 3

async def test_handler(outbox_for_tests, outbox_drain):
    await outbox_for_tests.executor.execute(PayOrder(0))
    await outbox_drain()
"""
    )

    result = run(project)

    result.assert_outcomes(failed=4)
    text = result.stdout.str()
    assert "expected one ReceiptSent(order_id=7), found 0; emitted events:" in text
    assert "OrderPaid(order_id=7)  of Order 7  by PayOrder" in text
    assert "Right contains one more item: ReceiptSent(order_id=8)" in text
    assert text.count("- outbox events -") == 3
    assert "OrderPaid(order_id=9)" in text
    assert "an order has a number" in text


SIMULATED = """
import asyncio
import pytest
from application import Mailer, OrderPaid, PayOrder, handlers
from outboxio import Outbox

async def pay(world, mailer):
    def make_outbox(database):
        outbox = Outbox(database, namespace="shop", resources={Mailer: mailer})
        outbox.include(handlers)

        @outbox.handler(OrderPaid, name="charge")
        async def charge(envelope):
            mailer.sent.append("charge")
            await asyncio.sleep(0.01)  # killed here

        return outbox

    process = await world.process(make_outbox)
    await process.outbox.execute(PayOrder(7))
    await world.settle()

@pytest.fixture
def limit():
    return 2

@pytest.mark.simulate(seeds=30)
async def test_twice(world, limit):
    mailer = Mailer()
    await pay(world, mailer)
    assert mailer.sent.count("charge") < limit, "charged too often"

class TestInClass:
    @pytest.mark.parametrize("number", [1, 2])
    @pytest.mark.simulate(seeds=[3], faults=False)
    async def test_once(self, number, world):
        mailer = Mailer()
        await pay(world, mailer)
        assert sorted(mailer.sent, key=str) == [7, "charge"]
        assert world.seed == 3

@pytest.mark.simulate
def test_not_async(world): ...

def test_without_mark(world): ...
"""


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_the_mark_simulate_runs_a_test_as_a_scenario(project: pytest.Pytester, mode: str) -> None:
    project.makepyfile(test_simulated=SIMULATED)

    result = run(project, "--strict-markers", f"--asyncio-mode={mode}")

    result.assert_outcomes(passed=2, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            '>*assert mailer.sent.count("charge") < limit*',
            "E*AssertionError: charged too often",
            "-* simulation -*",
            "With seed *, by virtual seconds:",
            "*process-1 * is killed at *test_simulated.py:14 in charge",
            "*process-1 * starts again",
            "Repeat it: pytest test_simulated.py::test_twice --simulation-seed *",
        ]
    )
    assert "ended differently" not in result.stdout.str()
    assert "a test with @pytest.mark.simulate must be `async def test_...(world)`" in result.stdout.str()
    assert "the fixture `world` is for tests with @pytest.mark.simulate" in result.stdout.str()


def test_a_seed_of_the_command_line_replaces_all_seeds(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_seed="import pytest\n"
        "@pytest.mark.simulate(seeds=5)\n"
        "async def test_seed(world):\n    assert world.seed != 17, 'this seed'\n"
    )

    run(project).assert_outcomes(passed=1)
    result = run(project, "--simulation-seed", "17")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*this seed*", "With seed 17, *"])


def test_a_run_without_the_fixtures_imports_nothing_from_outboxio(project: pytest.Pytester) -> None:
    project.path.joinpath("conftest.py").unlink()
    project.makepyfile(
        test_plain="import sys\ndef test_plain():\n    assert not {'outboxio', 'asyncpg'} & sys.modules.keys()\n"
    )

    result = project.runpytest_subprocess("-p", "outboxio_pytest", "-p", "no:cacheprovider", timeout=120)

    result.assert_outcomes(passed=1)
    result = project.run(sys.executable, "-m", "pytest", "-p", "outboxio_pytest", "--fixtures")
    for name in ("outbox_for_tests", "outbox_under_test", "outbox_clock", "outbox_events", "outbox_drain"):
        result.stdout.fnmatch_lines([f"{name} --*"])


def test_the_example_of_the_documentation_passes(project: pytest.Pytester) -> None:
    project.path.joinpath("conftest.py").unlink()
    page = (ROOT / "docs" / "how-to" / "testing.md").read_text("utf-8")
    project.makepyfile(test_page=page.split("```python\n")[1].split("```")[0])

    run(project, "--asyncio-mode=auto").assert_outcomes(passed=1)
