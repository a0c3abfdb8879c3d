"""The ``outboxio`` command as people and scripts use it. Workers and the demo run in their own processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from outboxio import Action, Event, Outbox, Transaction
from outboxio.cli import main
from outboxio.storage.schema import sql_files
from tests.kit.app import Look, eventually
from tests.kit.forked import Forked, fork
from tests.kit.marks import needs_partitions
from tests.kit.process_state import restored
from tests.kit.server_actions import with_password

pytestmark = pytest.mark.above_statements

ROOT = Path(__file__).parents[2]

# An application whose handler writes a file when it starts, and may wait for a second file.
SHOP = """
import asyncio, os
from pathlib import Path
from outboxio import Event, EventEnvelope, Outbox, RetryPolicy

class Ordered(Event):
    number: int

outbox = Outbox(os.environ["SHOP_DATABASE"], namespace="shop")
handlerless = Outbox(os.environ["SHOP_DATABASE"], namespace="shop")

@outbox.handler(Ordered, name="ship", aliases={"send"})
async def ship(envelope: EventEnvelope[Ordered]) -> None:
    if envelope.event.number < 0:
        raise ValueError("there is no such order")
    Path("began").touch()
    while Path("hold").exists():
        await asyncio.sleep(0.01)

def make() -> Outbox:
    return outbox

class Container:
    outbox = outbox
    @staticmethod
    async def make_later() -> Outbox:
        return outbox

number = 7
def broken(): raise RuntimeError("no configuration")
"""


class Ordered(Event):
    number: int


class Order(Action):
    number: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Ordered(self.number), model_id=self.number, model_type="Order")


class Answer:
    """The result of a command."""

    def __init__(self, code: int | None, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


#: Commands that need a separate process: they handle signals, or show all classes of events of the process.
APART = ("worker", "demo", "describe")


class Command:
    """Runs ``outboxio`` in the directory of an application."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        self.database = database
        (directory / "shop.py").write_text(SHOP)

    async def __call__(self, *arguments: str, **environ: str) -> Answer:
        """The result of a command that ends by itself."""
        if arguments[0] not in APART:
            return await asyncio.to_thread(self._in_this_process, arguments, self._environ(environ))
        async with self.started(*arguments, **environ) as process:
            out, err = await process.communicate()
        return Answer(process.returncode, out.decode(), err.decode())

    def _in_this_process(self, arguments: Sequence[str], environ: Mapping[str, str]) -> Answer:
        out, err, modules = StringIO(), StringIO(), set(sys.modules)
        with (
            restored(),
            chdir(self.directory),
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch.object(sys, "argv", ["outboxio", *arguments]),
            redirect_stdout(out),
            redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", "").startswith(str(self.directory)):
                del sys.modules[name]  # of the application of this test
        return Answer(ended.value.code or 0, out.getvalue(), err.getvalue())

    def _environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("OUTBOXIO_")}
        return {**inherited, "PYTHONPATH": str(ROOT), "SHOP_DATABASE": self.database, **environ}

    @asynccontextmanager
    async def started(self, *arguments: str, **environ: str) -> AsyncIterator[Forked]:
        """The running command, which does not outlive the block."""
        process = await fork(
            *("outboxio.cli", *arguments), folder=self.directory, environ=self._environ(environ), with_stderr=True
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


@pytest.fixture
def command(tmp_path: Path, database_url: str) -> Command:
    return Command(tmp_path, database_url)


@pytest.fixture
def local(tmp_path: Path) -> Command:
    """The command without a server: for behaviour that is the same on every database, or that needs none."""
    return Command(tmp_path, f"sqlite:///{tmp_path / 'local.db'}")


@pytest.fixture
async def shop(database_url: str) -> AsyncIterator[Outbox]:
    """The same application in this process, without its handlers, with fresh tables."""
    async with Outbox(database_url, namespace="shop") as outbox:
        await outbox.migrate()
        yield outbox


@pytest.fixture
async def local_shop(local: Command) -> AsyncIterator[Outbox]:
    async with Outbox(local.database, namespace="shop") as outbox:
        await outbox.migrate()
        yield outbox


async def line_with(stream: asyncio.StreamReader | None, text: str) -> None:
    """Wait for a line of a process."""
    assert stream is not None
    async with asyncio.timeout(20):
        async for line in stream:
            if text in line.decode():
                return
    raise AssertionError(f"the process ended without printing {text!r}")


# --- migrate and check ---------------------------------------------------------------------------


async def test_migrate_lists_the_applied_files_once(command: Command) -> None:
    files = [file.name for file in sql_files(Look(command.database).dialect)]

    first, second = await command("migrate", "shop:outbox"), await command("migrate", "shop:outbox")
    check = await command("check", "shop:outbox")

    assert first.code == second.code == check.code == 0, first
    assert all(file in first.out for file in files)
    assert "up to date" in second.out
    assert "all tables, columns and indexes exist" in check.out


async def test_migrate_prints_each_shard_as_json(command: Command) -> None:
    files = [file.name for file in sql_files(Look(command.database).dialect)]

    assert (await command("migrate", "--database", command.database, "--json")).json == {
        "applied": {"default": files},
        "pending": {"default": []},
    }
    assert (await command("migrate", "--database", command.database, "--json")).json == {
        "applied": {"default": []},
        "pending": {"default": []},
    }


async def test_check_of_an_empty_database_names_missing_parts_and_files(command: Command) -> None:
    answer = await command("check", "shop:outbox")

    assert answer.code == 1, answer
    assert "table events" in answer.out
    assert f"sql/{Look(command.database).dialect}/0001_events.sql" in answer.out
    assert "Traceback" not in answer.err


async def test_check_has_json_output(command: Command) -> None:
    before = await command("check", "shop:outbox", "--json")
    await command("migrate", "shop:outbox")
    after = await command("check", "shop:outbox", "--json")

    assert (before.code, before.json["ok"]) == (1, False)
    shard = before.json["shards"]["default"]
    assert "table events" in shard["missing"]
    assert f"sql/{Look(command.database).dialect}/0001_events.sql" in shard["files"]
    assert (after.code, after.json["ok"]) == (0, True)
    assert after.json["shards"]["default"] == {"ok": True, "error": None, "missing": [], "files": []}


async def test_check_names_one_missing_index(command: Command, shop: Outbox, look: Look) -> None:
    await look.drop_index("events", "events_undelivered")

    answer = await command("check", "--database", command.database)

    assert answer.code == 1
    assert "index events_undelivered" in answer.out


# --- status --------------------------------------------------------------------------------------


async def test_status_prints_counts_as_json(command: Command, shop: Outbox) -> None:
    await shop.executor.execute(Order(1))

    answer = await command("status", "shop:outbox", "--json")

    assert answer.code == 0, answer
    assert answer.json["namespace"] == "shop"
    assert answer.json["total"]["undelivered"] == 1
    assert answer.json["shards"]["default"] == answer.json["total"]
    assert answer.json["errors"] == {}


async def test_status_prints_counts_as_text(local: Command, local_shop: Outbox) -> None:
    await local_shop.executor.execute(Order(1))

    answer = await local("status", "--database", local.database, "--namespace", "shop")

    assert answer.code == 0, answer
    rows = {line.split()[0]: line.split()[1] for line in answer.out.splitlines() if len(line.split()) > 2}
    assert (rows["undelivered"], rows["PENDING"]) == ("1", "0")


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["list"], ["health"], ["pause", "mail"], ["dashboard"]])
async def test_a_misspelt_namespace_is_refused_with_the_known_ones(
    local: Command, local_shop: Outbox, command: list[str]
) -> None:
    await local_shop.executor.execute(Order(1))

    answer = await local(command[0], local.database, *command[1:], "--namespace", "shp")

    assert (answer.code, answer.err.strip()) == (2, "error: no such namespace 'shp'; there are: 'shop'"), answer


async def test_a_database_without_rows_accepts_any_namespace(local: Command, local_shop: Outbox) -> None:
    answer = await local("doctor", local.database, "--namespace", "shp")

    assert answer.code == 0, answer
    assert "All is well" in answer.out


@pytest.mark.parametrize("name", ["status", "list", "list-events", "jobs"])
async def test_a_command_without_tables_prints_the_command_to_run(command: Command, name: str) -> None:
    answer = await command(name, "shop:outbox")

    assert answer.code == 1
    [line] = answer.err.splitlines()
    assert "and 13 more parts: " in line or "and 11 more parts: " in line
    assert "run `outboxio migrate shop:outbox`" in line
    assert "`outboxio check shop:outbox` lists the parts and the SQL files" in line


async def test_a_database_managed_by_alembic_is_migrated_by_a_revision(local: Command, look: Look) -> None:
    with sqlite3.connect(local.database.removeprefix("sqlite:///")) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    database.close()

    status, check = await local("status", "shop:outbox"), await local("check", "shop:outbox")

    assert "write a revision with `outboxio alembic-revision`, and apply it with `alembic upgrade head`" in status.err
    assert "outboxio alembic-revision, then alembic upgrade head" in check.out
    assert "outboxio migrate" not in status.err + check.out


async def test_status_shows_the_other_shards_if_one_is_unreachable(local: Command, local_shop: Outbox) -> None:
    (local.directory / "sharded.py").write_text(
        "import os\nfrom outboxio import Outbox\n"
        "outbox = Outbox({'up': os.environ['SHOP_DATABASE'], 'down': 'postgresql://127.0.0.1:1/x'}, namespace='shop')\n"
    )

    answer = await local("status", "sharded:outbox", "--json")

    assert answer.code == 3
    assert answer.json["shards"]["up"]["PENDING"] == 0
    assert "127.0.0.1:1" in answer.json["errors"]["down"]


# --- partitions ----------------------------------------------------------------------------------


async def test_partitions_shows_the_owners_of_each_handler(command: Command, shop: Outbox) -> None:
    async with command.started("worker", "shop:outbox") as worker:
        await line_with(worker.stderr, "acquired shop/dispatch/ship")
        answer = await command("partitions", "shop:outbox")
        of_one = await command("partitions", "--database", command.database, "--namespace", "shop", "send", "--json")

    assert answer.code == 0, answer
    assert "ship" in answer.out
    assert f":{worker.pid}:" in answer.out
    assert [one["handler_name"] for one in of_one.json] == ["send", "ship"]


@needs_partitions
async def test_partitions_sets_the_count_for_all_processes(command: Command, shop: Outbox, look: Look) -> None:

    async with command.started("worker", "shop:outbox") as worker:
        await line_with(worker.stderr, "acquired shop/dispatch/ship")
        answer = await command("partitions", "shop:outbox", "ship", "4")

        async def one_process_has_all() -> bool:
            shown = (await command("partitions", "shop:outbox", "ship")).out
            return "0-3" in shown and "no process" not in shown

        await eventually(one_process_has_all)

    assert answer.code == 0, answer
    assert "ship: 1 -> 4 partitions" in answer.out
    assert worker.returncode is not None


@needs_partitions
async def test_partitions_shows_who_set_the_count(command: Command, shop: Outbox) -> None:
    await command("partitions", "shop:outbox", "ship", "4")
    ordered = await command("partitions", "shop:outbox", "ship")
    dry = await command("partitions", "shop:outbox", "ship", "auto", "--dry-run")
    given_back = await command("partitions", "shop:outbox", "ship", "auto")

    assert "set by an operator" in " ".join(ordered.out.split())
    assert "let outboxio choose the number of partitions of send, ship" in " ".join(dry.out.split())
    assert "automatic" in given_back.out


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        (["shipp"], "did you mean 'ship'?"),
        (["ship", "65"], "expected 'auto', or a whole number from 1 to 64"),
        (["ship", "8"], "sqlite, which has a single writer"),
    ],
)
async def test_invalid_partition_counts_are_refused_with_a_clear_error(
    local: Command, local_shop: Outbox, arguments: list[str], because: str
) -> None:
    answer = await local("partitions", "shop:outbox", *arguments)

    assert answer.code == 2, answer
    assert because in answer.err


async def test_partitions_without_tables_says_what_to_do(local: Command) -> None:
    answer = await local("partitions", "shop:outbox")

    assert answer.code == 1
    assert "outboxio migrate" in answer.err


# --- worker --------------------------------------------------------------------------------------


async def test_a_worker_leaves_gracefully_on_sigterm(command: Command, shop: Outbox, look: Look) -> None:
    hold, began = command.directory / "hold", command.directory / "began"
    hold.touch()
    await shop.executor.execute(Order(1))

    async with command.started("worker", "shop:outbox") as worker:
        await eventually(began.exists)
        worker.send_signal(signal.SIGTERM)
        await line_with(worker.stderr, "stopping")
        hold.unlink()
        _, err = await worker.communicate()

    assert worker.returncode == 0
    assert "succeeded 1, failed 0" in err.decode()
    assert await look.states() == {"SUCCEEDED": 1}


async def test_a_second_signal_ends_a_worker_at_once(local: Command, local_shop: Outbox) -> None:
    look = Look(local.database)
    (local.directory / "hold").touch()
    await local_shop.executor.execute(Order(1))

    async with local.started("worker", "shop:outbox") as worker:
        await eventually((local.directory / "began").exists)
        worker.send_signal(signal.SIGINT)
        await line_with(worker.stderr, "stopping")
        worker.send_signal(signal.SIGINT)
        await worker.communicate()  # the handler would never finish

    assert worker.returncode == -signal.SIGINT
    [notification] = await look.notifications()
    assert (notification["state"], notification["attempts"]) == ("PENDING", 0)


async def test_a_worker_prints_what_it_runs_and_hides_the_password(command: Command, shop: Outbox) -> None:
    async with with_password(command.database, "s3cret") as database:
        environ = {"SHOP_DATABASE": database}
        async with command.started("worker", "shop:outbox", **environ) as worker:
            await line_with(worker.stderr, "acquired shop/dispatch/ship")
            worker.send_signal(signal.SIGTERM)
            _, err = await worker.communicate()
        answer = await command("worker", "shop:outbox", "--drain", **environ)

    for part in ("fans out and runs handlers for namespace shop", "ship", "Ordered", "aliases: send"):
        assert part in answer.err
    assert "s3cret" not in answer.err + err.decode()


async def test_a_worker_prints_its_jobs_and_a_drain_runs_none(local: Command, local_shop: Outbox) -> None:
    (local.directory / "closing.py").write_text(
        "from shop import outbox\n\n@outbox.job('close-day', every='1h')\nasync def close_day() -> None: ...\n"
    )
    async with local.started("worker", "closing:outbox") as worker:
        await line_with(worker.stderr, "close-day  every 3600 s")
        worker.send_signal(signal.SIGTERM)
        await worker.communicate()
    drained = await local("worker", "closing:outbox", "--drain")

    assert drained.code == 0, drained
    assert "ship" in drained.err
    assert "close-day" not in drained.err


async def test_a_drain_ends_by_itself(command: Command, shop: Outbox, look: Look) -> None:
    await shop.executor.execute(Order(1))

    answer = await command("worker", "shop:outbox", "--drain")

    assert answer.code == 0, answer
    assert "fanned out 1, succeeded 1" in answer.err
    assert await look.states() == {"SUCCEEDED": 1}


async def test_a_drain_fails_while_a_retry_is_pending(local: Command, local_shop: Outbox) -> None:
    await local_shop.executor.execute(Order(-1))

    answer = await local("worker", "shop:outbox", "--drain", "--log-level", "error")

    assert answer.code == 1
    assert "1 failed notifications wait for a retry" in answer.err
    assert "there is no such order" not in answer.err


SCHEDULED = """
import os
from datetime import timedelta
from outboxio import Batch, Outbox
from shop import Ordered

outbox = Outbox(os.environ["SHOP_DATABASE"], namespace="shop")

@outbox.handler(Ordered, name="report", batch=Batch(schedule="0 0 1 1 *"))
async def report(envelopes):
    pass
"""


async def test_a_drain_succeeds_while_events_wait_for_a_schedule(local: Command, local_shop: Outbox) -> None:
    (local.directory / "scheduled.py").write_text(SCHEDULED)
    await local_shop.executor.execute(Order(1))

    answer = await local("worker", "scheduled:outbox", "--drain")

    assert answer.code == 0, answer
    assert "scheduled or delayed for later: 1" in answer.err


async def test_a_drain_fails_while_a_paused_handler_has_due_notifications(local: Command, local_shop: Outbox) -> None:
    await local_shop.executor.execute(Order(1))
    await local("worker", "shop:outbox", "--drain")  # announces the handler
    await local_shop.admin.pause("ship")
    await local_shop.executor.execute(Order(2))

    answer = await local("worker", "shop:outbox", "--drain")

    assert answer.code == 1, answer
    assert "'ship'" in answer.err


# --- the worker's log ------------------------------------------------------------------------------

LOGGING = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="mine: %(name)s %(message)s")
from shop import outbox
"""


async def test_an_application_that_configures_logging_keeps_its_log(local: Command, local_shop: Outbox) -> None:
    (local.directory / "logs.py").write_text(LOGGING)
    await local_shop.executor.execute(Order(-1))

    answer = await local("worker", "logs:outbox", "--drain", "--log-format", "json")

    assert "mine: outboxio.runs.failure_classifier handler 'ship' failed" in answer.out
    assert "mine: outboxio.worker outboxio" in answer.out, "the worker's records are in the application's log"
    assert answer.err.splitlines() == ["error: work is left: 1 failed notifications wait for a retry"]


async def test_a_worker_logs_json_on_request(local: Command, local_shop: Outbox) -> None:
    await local_shop.executor.execute(Order(-1))

    answer = await local("worker", "shop:outbox", "--drain", "--log-format", "json")

    records = [json.loads(line) for line in answer.err.splitlines()]
    [failure] = [record for record in records if record["level"] == "WARNING"]
    assert failure["template"] == "handler %r failed for event %s (attempt %d, now %s): %s%s"
    assert (failure["outboxio_handler"], failure["outboxio_attempt"]) == ("ship", 1)
    assert {"outboxio_namespace", "outboxio_shard", "outboxio_event_id"} < set(failure)
    assert {"time", "level", "logger", "message"} <= set(records[0])
    assert any("fans out and runs handlers" in record["message"] for record in records)
    assert (records[-1]["level"], records[-1]["outboxio_failed"]) == ("ERROR", 1)


SPEAKING = """
import logging
from shop import Ordered, outbox

@outbox.handler(Ordered, name="speak")
async def speak(envelope):
    logging.getLogger("shop").warning("shipping")
"""


async def test_a_handlers_own_records_have_their_event_in_the_json_log(local: Command, local_shop: Outbox) -> None:
    (local.directory / "speaking.py").write_text(SPEAKING)
    await local_shop.executor.execute(Order(1))

    answer = await local("worker", "speaking:outbox", "--drain", "--log-format", "json")

    assert answer.code == 0, answer
    [spoken] = [record for record in map(json.loads, answer.err.splitlines()) if record["logger"] == "shop"]
    assert (spoken["message"], spoken["outboxio_handler"], spoken["outboxio_attempt"]) == ("shipping", "speak", 1)
    assert UUID(spoken["outboxio_event_id"])


async def test_a_worker_leaves_logging_unconfigured_on_request(local: Command, local_shop: Outbox) -> None:
    answer = await local("worker", "shop:outbox", "--drain", "--no-log-setup")

    assert answer.code == 0
    assert answer.err == "", "only what Python's handler of last resort shows: warnings and errors"


async def test_a_worker_without_handling_only_fans_out(local: Command, local_shop: Outbox) -> None:
    look = Look(local.database)
    await local_shop.executor.execute(Order(1))

    async with local.started("worker", "shop:outbox", "--no-handling") as worker:

        async def is_fanned_out() -> bool:
            return await look.states() == {"PENDING": 1}

        await eventually(is_fanned_out)
        worker.send_signal(signal.SIGTERM)
        await worker.communicate()

    assert worker.returncode == 0
    assert await look.states() == {"PENDING": 1}


async def test_a_worker_without_handlers_logs_a_warning(local: Command, local_shop: Outbox) -> None:
    answer = await local("worker", "shop:handlerless", "--drain")

    assert "no handlers are registered" in answer.err


@pytest.mark.parametrize("target", ["shop:make", "shop:Container.outbox", "shop:Container.make_later"])
async def test_an_outbox_is_found_through_attributes_and_calls(local: Command, target: str) -> None:
    assert (await local("migrate", target)).code == 0
    assert (await local("worker", target, "--drain")).code == 0


async def test_the_target_may_come_from_the_environment_or_pyproject(local: Command, local_shop: Outbox) -> None:
    (local.directory / "pyproject.toml").write_text('[tool.outboxio]\ntarget = "shop:outbox"\nconcurrency = 7\n')

    from_environment = await local("status", "--json", OUTBOXIO_TARGET=local.database, OUTBOXIO_NAMESPACE="other")
    from_project = await local("status", "--json")
    of_the_command_line = await local("describe", "shop:handlerless", "--json")

    assert from_environment.json["namespace"] == "other"
    assert from_project.json["namespace"] == "shop"
    assert of_the_command_line.json["handlers"] == []


async def test_describe_lists_registrations_without_a_database(local: Command) -> None:
    answer = await local("describe", "shop:outbox", "--json", SHOP_DATABASE="postgresql://127.0.0.1:1/app")
    for_people = await local("describe", "shop:handlerless")

    assert answer.code == 0, answer
    [ship] = answer.json["handlers"]
    assert (ship["name"], ship["aliases"], ship["event_types"]) == ("ship", ["send"], ["Ordered"])
    assert answer.json["unhandled"] == []
    assert "no handler here for Ordered" in for_people.out


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        (["worker", "nothing:outbox"], "no module named 'nothing'"),
        (["worker", "shop:nothing"], "module shop has no 'nothing'; its outboxes: shop:outbox, shop:handlerless"),
        (["worker", "shop:Container.nothing"], "has no 'Container.nothing'"),
        (["worker", "shop"], "expected module:outbox"),
        (["worker", "shop:number"], "shop:number is 7, neither an Outbox nor a callable that returns one"),
        (["worker", "shop:broken"], "calling shop:broken() failed: RuntimeError: no configuration"),
        (["worker", "importing:outbox"], "importing importing failed: no module named 'absent'"),
        (["worker", "failing:outbox"], "importing failing failed: ZeroDivisionError"),
        (
            ["worker", "web:app"],
            "web:app is a FastAPI, neither an Outbox nor a callable that returns one; its outboxes: web:outbox",
        ),
        (["worker", "script:outbox"], 'move that call below `if __name__ == "__main__":` at the end of the module'),
        (["worker", "shop:outbox", "--no-fanout", "--no-handling"], "leaves nothing to do"),
        (["worker", "shop:outbox", "--drain", "--no-fanout"], "--drain fans out and runs handlers"),
        (["worker", "shop:outbox", "--timeout", "1s"], "--timeout requires --drain"),
        (["worker", "shop:outbox", "--drain", "--health-port", "0"], "--health-port cannot be used with --drain"),
        (["check"], "set OUTBOXIO_TARGET"),
        (["check", "shop"], "'shop' is not an outbox: expected module:outbox"),
        (["check", "shop:outbox", "--database", "sqlite://"], "use only one of them"),
        (["status", "--database", "sqlite://"], "use --namespace"),
        (["status", "sqlite://"], "use --namespace"),
        (["worker", "sqlite://"], "a worker needs the handlers in your code"),
        (["partitions", "--database", "sqlite://"], "use --namespace"),
        (["partitions"], "set OUTBOXIO_TARGET"),
        (["partitions", "shop:outbox", "ship", "many"], "invalid number of partitions 'many'"),
        (["partitions", "shop:outbox", "ship", "8", "send"], "unexpected argument 'send'"),
        (["check", "--database", "gopher://host"], "the scheme 'gopher'"),
        (["demo", "--database", "mysql://me:s3cret@127.0.0.1:1"], "127.0.0.1:1 names no database"),
        (["dance"], "No such command 'dance'"),
    ],
)
async def test_an_invalid_command_line_is_refused_with_a_clear_error(
    local: Command, arguments: list[str], because: str
) -> None:
    (local.directory / "importing.py").write_text("import absent\n")
    (local.directory / "failing.py").write_text("1 / 0\n")
    (local.directory / "web.py").write_text("from fastapi import FastAPI\nfrom shop import outbox\napp = FastAPI()\n")
    (local.directory / "script.py").write_text("import asyncio\nasync def main(): ...\nasyncio.run(main())\n")

    answer = await local(*arguments)

    assert answer.code == 2, answer
    assert because in answer.err
    assert "s3cret" not in answer.out + answer.err
    assert "Traceback" not in answer.err


async def test_an_unknown_setting_is_refused_by_name(local: Command) -> None:
    answer = await local("check", "--database", "sqlite://", OUTBOXIO_CONCURENCY="5")

    assert answer.code == 2
    assert "OUTBOXIO_CONCURENCY" in answer.err
    assert "did you mean OUTBOXIO_CONCURRENCY?" in answer.err


async def test_a_setting_refused_by_the_application_is_named(local: Command) -> None:
    (local.directory / "app.py").write_text("from outboxio import Settings\nSettings(concurrency=0)\n")

    answer = await local("worker", "app:outbox")

    assert answer.code == 2
    assert "setting concurrency = 0: expected a whole number, 1 or more" in answer.err


CONFIGURED = """
from outboxio import Outbox, Settings
outbox = Outbox("sqlite:///app.db", namespace="app", settings=Settings(concurrency=3))
"""


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OUTBOXIO_CONCURENCY", "5", "did you mean OUTBOXIO_CONCURRENCY?"),
        ("OUTBOXIO_CONCURRENCY", "lots", "OUTBOXIO_CONCURRENCY = 'lots': expected a whole number"),
    ],
)
async def test_a_worker_refuses_invalid_variables_despite_settings(
    local: Command, variable: str, value: str, message: str
) -> None:
    (local.directory / "configured.py").write_text(CONFIGURED)

    for target in ("shop:outbox", "configured:outbox"):
        answer = await local("worker", target, "--validate", **{variable: value})

        assert answer.code == 2, answer
        assert message in answer.err


async def test_a_worker_refuses_unknown_keys_of_pyproject(local: Command) -> None:
    (local.directory / "pyproject.toml").write_text("[tool.outboxio]\nconcurency = 7\n")

    answer = await local("worker", "shop:outbox", "--validate")

    assert answer.code == 2
    assert "did you mean concurrency?" in answer.err


async def test_a_worker_warns_about_settings_ignored_by_the_code(local: Command) -> None:
    (local.directory / "configured.py").write_text(CONFIGURED)
    (local.directory / "pyproject.toml").write_text("[tool.outboxio]\nmax_hops = 7\nconcurrency = 3\n")
    assert (await local("migrate", "configured:outbox")).code == 0

    answer = await local("worker", "configured:outbox", "--validate", OUTBOXIO_KEEP_DEAD="1d")

    assert answer.code == 0, answer
    assert "setting keep_dead of the environment or pyproject.toml is ignored" in answer.err
    assert "setting max_hops" in answer.err
    assert "setting concurrency" not in answer.err


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "mariadb"])
@pytest.mark.parametrize("name", ["migrate", "check", "status", "partitions"])
async def test_an_unreachable_database_has_its_own_exit_code(local: Command, name: str, scheme: str) -> None:
    answer = await local(name, "--database", f"{scheme}://me:s3cret@127.0.0.1:1/app", "--namespace", "shop")

    assert answer.code == 3
    assert "127.0.0.1:1/app cannot be reached" in answer.out + answer.err
    assert "s3cret" not in answer.out + answer.err
    assert "Traceback" not in answer.err


async def test_a_worker_with_an_unreachable_database_exits_with_3(local: Command) -> None:
    assert (await local("worker", "shop:outbox", SHOP_DATABASE="postgresql://127.0.0.1:1/app")).code == 3


async def test_errors_are_printed_as_json_on_request(local: Command) -> None:
    answer = await local("migrate", "--database", "postgresql://127.0.0.1:1/app", "--json")

    assert answer.code == 3
    assert answer.json["error"]["type"] == "DatabaseUnavailable"


async def test_verbose_shows_the_traceback_of_an_error(local: Command) -> None:
    (local.directory / "failing.py").write_text("1 / 0\n")

    answer = await local("worker", "failing:outbox", "--verbose")

    assert answer.code == 2
    assert 'failing.py", line 1' in answer.err


# --- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["migrate", "check", "worker", "status", "partitions", "demo"])
async def test_every_command_has_a_help_text(local: Command, name: str) -> None:
    answer = await local(name, "--help")

    assert answer.code == 0
    assert "Example: outboxio" in answer.out


@pytest.mark.parametrize("name", ["migrate", "check", "status", "partitions", "demo"])
async def test_the_help_names_every_kind_of_database(local: Command, name: str) -> None:
    answer = await local(name, "--help")

    for scheme in ("postgresql://", "mysql://", "mariadb://", "sqlite:///"):
        assert scheme in answer.out


async def test_the_demo_checks_its_balances(local: Command) -> None:
    answer = await local("demo")

    assert answer.code == 0, answer
    assert "It adds up." in answer.out
    assert answer.err == ""


async def test_the_demo_works_on_an_ascii_terminal(local: Command) -> None:
    answer = await local("demo", PYTHONIOENCODING="ascii")

    assert answer.code == 0, answer


def test_without_its_extra_the_command_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outboxio.cli.find_spec", lambda name: None)

    with pytest.raises(SystemExit) as left:
        main()

    assert left.value.code == 2
    assert "pip install 'outboxio[cli]'" in capsys.readouterr().err
