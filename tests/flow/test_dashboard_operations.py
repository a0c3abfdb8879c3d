"""Operations in the dashboard: each with its confirmation, reason and record."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import cached_property
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from outboxio import EventEnvelope, Filter, Operation, OperationState, Outbox, RetryPolicy
from outboxio.dashboard import Access, Dashboard
from outboxio.dashboard.pages import bulk_operations
from outboxio.operations import notifications
from outboxio.support.clock import utc_now
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, hang
from tests.kit.dashboards import browser, send_form
from tests.kit.inside import fresh_overview
from tests.kit.jobs import ran
from tests.kit.storage import Store

pytestmark = pytest.mark.usefixtures("patient_pages")

ADA = "ada@example.org"
Fields = Mapping[str, str | Sequence[str]]


class Desk:
    """An operator in front of the dashboard of a small outbox."""

    def __init__(self, outbox: Outbox, look: Look, client: httpx.AsyncClient) -> None:
        self.outbox = outbox
        self.look = look
        self.client = client

    @cached_property
    def store(self) -> Store:
        return Store(self.outbox, self.look)

    async def dead(self, number: int, **options: Any) -> list[str]:
        """Create dead letters of the handler ``mail``, and return their ids."""
        now = utc_now() - timedelta(minutes=1)
        await self.store.subscribe("mail", now=now, **options)
        await self.store.deposit(*["k" if options.get("ordered") else None] * number)
        await self.store.fan_out(utc_now(), batch_size=number)
        error = '[{"type": "ValueError", "message": "no address 7"}]'
        await self.look.fetch(
            f"UPDATE {{event_notifications}} SET state = 'DEAD', attempts = 5, errors = '{error}', "
            f"updated_date = '{now:%Y-%m-%d %H:%M:%S.%f}'"
        )
        if options.get("ordered"):
            await self.look.fetch(
                "UPDATE {event_notifications} SET state = 'BLOCKED', errors = '[]' "
                "WHERE sequence > (SELECT min(sequence) FROM {event_notifications})"
            )
        return [row["id"] for row in await self.look.notifications()]

    async def send(self, name: str, fields: Fields | None = None, *, back: str = "/dead") -> httpx.Response:
        return await send_form(self.client, f"/operations/{name}", {"back": back, **(fields or {})})

    async def confirmed(self, name: str, fields: Fields, **answers: str) -> httpx.Response:
        """Send a form, and confirm the page that confirmation for confirmation."""
        page = await self.send(name, fields)
        assert page.status_code == 200, page.text
        hidden = hidden_fields(page)
        assert hidden["sure"] == ["yes"]
        return await self.send(name, {**hidden, **answers}, back=hidden["back"][0])

    async def newest(self) -> Operation:
        return (await self.outbox.admin.operations(1))[0]

    async def states(self) -> dict[str, int]:
        return await self.look.states()


def hidden_fields(page: httpx.Response) -> dict[str, list[str]]:
    """The hidden fields of the form on a page."""
    hidden: dict[str, list[str]] = {}
    for name, value in re.findall(
        r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page.text.partition("<main")[2]
    ):
        hidden.setdefault(name, []).append(unescape(value))
    return hidden


def words(answer: httpx.Response) -> str:
    main = answer.text.partition("<main")[2].partition("</main>")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", main)).split())


@asynccontextmanager
async def desk(path: Path, access: Access | None = None) -> AsyncGenerator[Desk]:
    url, allowed = f"sqlite:///{path / 'desk.db'}", access or Access.admin(ADA)
    async with Outbox(url, namespace="app") as outbox:
        await outbox.migrate()
        async with browser(Dashboard(outbox, authorize=lambda request: allowed)) as client:
            yield Desk(outbox, Look(url), client)


async def test_a_single_retry_runs_at_once_and_records_its_actor(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        [first, *_] = await at.dead(3)
        answer = await at.send("retry", {"id": first, "reason": "the address is known now"}, back="/dead?handler=mail")

        operation = await at.newest()
        assert (answer.status_code, answer.headers["location"]) == (303, f"/dead?handler=mail&did={operation.id}")
        assert (operation.kind, operation.actor, operation.origin, operation.reason, operation.done) == (
            "retry", ADA, "dashboard", "the address is known now", 1,
        )  # fmt: skip
        assert await at.states() == {"DEAD": 2, "PENDING": 1}
        page = await at.client.get(answer.headers["location"])
        assert "1 of 1 done" in words(page)


async def test_a_selection_is_confirmed_with_its_count(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        ids = await at.dead(5)
        page = await at.send("skip", {"id": ids[:3]})
        assert "Skip 3 notifications?" in words(page)
        assert "the 3 selected notifications" in words(page).lower()
        assert "View as JSON" not in words(page), "a confirmation has no JSON"
        assert await at.states() == {"DEAD": 5}

        answer = await at.confirmed("skip", {"id": ids[:3]}, reason="test orders")
        assert answer.status_code == 303
        assert await at.states() == {"DEAD": 2, "SKIPPED": 3}
        assert (await at.newest()).reason == "test orders"
        assert "No notification is selected." in words(await at.send("retry"))


async def test_an_operation_on_all_matches_reaches_the_counted_rows(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.dead(20)
        chosen = {"handler": "mail", "error": "ValueError: no address *"}
        page = words(await at.send("retry", chosen))
        assert "Retry 20 notifications?" in page
        assert "“ValueError: no address *” in the last error" in page
        assert "No process of the outbox is running, so this page runs the operation while you wait." in page

        answer = await at.confirmed("retry", chosen, reason="fixed")
        operation = await at.newest()
        assert answer.headers["location"] == f"/operations/{operation.id}?of=20"
        assert (operation.state, operation.done, operation.reason) == (OperationState.DONE, 20, "fixed")
        assert await at.states() == {"PENDING": 20}
        page = words(await at.client.get(answer.headers["location"]))
        assert "20 notifications matched" in page
        assert "20 changed" in page

        again = words(await at.send("retry", chosen))
        assert "There is nothing to retry" in again


async def test_rows_that_die_after_the_confirmation_are_skipped(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        ids = await at.dead(3)
        page = await at.send("retry", {"handler": "mail"})
        later = utc_now() + timedelta(seconds=30)
        await at.look.fetch(
            f"UPDATE {{event_notifications}} SET updated_date = '{later:%Y-%m-%d %H:%M:%S.%f}' WHERE id = $1", ids[0]
        )
        await at.send("retry", hidden_fields(page))
        assert await at.states() == {"DEAD": 1, "PENDING": 2}


async def test_skipping_all_matches_requires_typing_the_count(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.dead(12)
        answer = await at.confirmed("skip", {"handler": "mail"}, typed="120", reason="old")
        assert answer.status_code == 422
        assert "Type 12 to confirm; the field contains 120." in words(answer)
        assert 'value="old"' in answer.text
        assert await at.states() == {"DEAD": 12}
        await at.confirmed("skip", {"handler": "mail"}, typed="12")
        assert await at.states() == {"SKIPPED": 12}


async def test_a_bulk_retry_of_5000_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "CHUNK", 250)
    async with desk(tmp_path) as at:
        await at.dead(5_000)
        async with at.outbox.running():
            answer = await at.confirmed("retry", {"handler": "mail"}, reason="the mail server is back")
            location = answer.headers["location"]
            shares: list[float] = []

            async def is_done() -> bool:
                nonlocal found
                found = (await at.client.get(f"{location}&format=json")).json()
                shares.append(found["share"])
                return bool(found["operation"]["state"] != "RUNNING")

            found: Any = None
            await eventually(is_done, timeout=120)
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        assert (found["operation"]["done"], found["operation"]["matched"]) == (5_000, 5_000)
        assert (await at.states())["PENDING"] == 5_000
        page = words(await at.client.get(location))
        assert "5,000 notifications matched" in page
        assert "the mail server is back" in page


async def test_a_large_operation_without_a_process_waits_and_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_operations, "MAX_WITHOUT_PROCESS", 10)
    async with desk(tmp_path) as at:
        await at.dead(11)
        assert "starts when a process starts" in words(await at.send("retry", {"handler": "mail"}))
        answer = await at.confirmed("retry", {"handler": "mail"})
        page = await at.client.get(answer.headers["location"])
        assert "RUNNING" in words(page)
        assert "11 left" in words(page)
        operation = await at.newest()
        stopped = await at.send("stop", {"id": str(operation.id)}, back=f"/operations/{operation.id}")
        assert stopped.status_code == 303

        async def is_stopped() -> bool:
            found = await at.outbox.admin.operation(operation.id)
            return found is not None and found.state is OperationState.STOPPED

        async with at.outbox.running():
            await eventually(is_stopped, timeout=60)
        assert await at.states() == {"DEAD": 11}
        again = await at.send("stop", {"id": str(operation.id)})
        assert again.status_code == 409


async def test_states_an_operation_cannot_change_are_refused_or_skipped(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.dead(2)
        answer = await at.send("retry", {"state": "SUCCEEDED"})
        assert answer.status_code == 400
        assert "SUCCEEDED cannot be changed by retry" in words(answer)
        assert "2 notifications" in words(await at.send("retry", {"state": ["SUCCEEDED", "DEAD"]}))
        wrong: list[tuple[Fields, str]] = [
            ({"id": "7"}, "is not the id of"), ({"handler": "mial"}, "did you mean 'mail'"),
            ({"handler": "mail", "id": "7"}, "has both ids and a filter"),
            ({"handel": "mail"}, "no filter 'handel'"), ({"handler": "mail", "shard": "x"}, "There is no shard"),
        ]  # fmt: skip
        for fields, expected in wrong:
            answer = await at.send("retry", fields)
            assert (answer.status_code, expected in words(answer)) == (400, True), (fields, words(answer))
        assert await at.states() == {"DEAD": 2}


async def test_pause_and_unpause(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.dead(1)
        assert "No run of the handler starts" in words(await at.send("pause", {"handler": "mail"}))
        assert await at.outbox.admin.paused() == set()
        answer = await at.confirmed("pause", {"handler": "mail"}, reason="the server moves")
        operation = await at.newest()
        assert answer.headers["location"] == f"/dead?did={operation.id}"
        assert (operation.kind, operation.actor, operation.reason) == ("pause", ADA, "the server moves")
        assert await at.outbox.admin.paused() == {"mail"}
        await at.send("unpause", {"handler": "mail"})
        assert await at.outbox.admin.paused() == set()
        assert (await at.newest()).kind == "unpause"
        assert (await at.confirmed("pause", {"handler": "mial"})).status_code == 400


async def test_a_parked_key_is_resumed_after_a_confirmation(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.dead(3, ordered=True)
        assert await at.states() == {"BLOCKED": 2, "DEAD": 1}
        page = await at.client.get("/keys")
        assert "Resume…" in words(page)
        fields = {"handler": "mail", "key": "k"}
        assert "The dead letters that park the key end SKIPPED" in words(await at.send("resume", fields))
        await at.confirmed("resume", fields, reason="the account is closed")
        assert (await at.states())["SKIPPED"] == 1
        operation = await at.newest()
        assert (operation.kind, operation.done, operation.reason) == ("resume", 1, "the account is closed")
        assert "No parked keys." in words(await at.client.get("/keys"))


async def test_replay_and_backfill_require_a_time(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.dead(4)
        for operation_name in ("replay", "backfill"):
            without = await at.confirmed(operation_name, {"handler": "mail"})
            assert (without.status_code, "since is missing" in words(without)) == (422, True)
            wrong = await at.confirmed(operation_name, {"handler": "mail"}, since="soon", reason="why")
            assert (wrong.status_code, "since is soon; expected a date" in words(wrong)) == (422, True)
            assert 'value="soon"' in wrong.text
            assert 'value="why"' in wrong.text
        answer = await at.confirmed("replay", {"handler": "mail"}, since="2h", reason="again")
        assert answer.status_code == 303
        assert await at.states() == {"PENDING": 4}
        operation = await at.newest()
        assert (operation.kind, operation.done, operation.reason) == ("replay", 4, "again")
        await at.store.subscribe("late", now=utc_now())
        await at.confirmed("backfill", {"handler": "late"}, since="2h")
        assert await at.states() == {"PENDING": 8}


async def test_unsubscribe_and_purge_require_typing_the_name(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.dead(1)
        refused = await at.confirmed("unsubscribe", {"handler": "mail"}, typed="male")
        assert refused.status_code == 422
        await at.confirmed("unsubscribe", {"handler": "mail"}, typed="mail", reason="gone")
        assert (await at.newest()).kind == "unsubscribe"
        assert (await at.confirmed("purge", {}, typed="")).status_code == 422
        answer = await at.confirmed("purge", {}, typed="app")
        assert answer.status_code == 303
        assert (await at.newest()).kind == "purge"
        assert await at.states() == {"DEAD": 1}


async def test_a_user_without_permission_gets_403_and_changes_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path, Access("eve", can={"payloads"})) as at:
        [id] = await at.dead(1)
        forms = {
            "retry": {"id": id}, "skip": {"id": id}, "resume": {"handler": "mail", "key": "k"},
            "pause": {"handler": "mail"},
            "unpause": {"handler": "mail"}, "replay": {"handler": "mail", "since": "2h"}, "purge": {"typed": "app"},
            "backfill": {"handler": "mail", "since": "2h"}, "unsubscribe": {"handler": "mail", "typed": "mail"},
            "stop": {"id": id},
        }  # fmt: skip
        for name, fields in forms.items():
            assert (await at.send(name, {**fields, "sure": "yes"})).status_code == 403, name
        assert await at.states() == {"DEAD": 1}
        assert await at.outbox.admin.operations() == []


async def test_hostile_names_are_plain_text_in_a_confirmation(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        hostile = "<script>alert(1)</script>\"'"
        for name, fields in (("pause", {"handler": hostile}), ("resume", {"handler": hostile, "key": hostile})):
            page = await at.send(name, fields, back="//evil.example")
            assert "<script>alert" not in page.text
            assert 'href="/"' in page.text
            assert "evil" not in page.text


async def test_an_operation_on_a_group_is_limited_to_it(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.dead(4)
        other = '[{"type": "KeyError", "message": "1"}]'
        await at.look.fetch(
            f"UPDATE {{event_notifications}} SET errors = '{other}' WHERE id IN "
            "(SELECT id FROM {event_notifications} LIMIT 1)"
        )
        [group] = [one for one in await at.outbox.admin.groups(Filter(states=("DEAD",))) if one.count == 3]
        page = await at.client.get("/dead")
        assert "Retry 3" in words(page)
        assert "Retry 1" in words(page)
        await at.confirmed("retry", {"handler": "mail", "error": group.fingerprint, "state": "DEAD"})
        assert await at.states() == {"DEAD": 1, "PENDING": 3}


async def test_an_operation_works_beside_a_running_handler(tmp_path: Path) -> None:
    """The running process carries out the page's retry, and the handler runs again."""
    async with desk(tmp_path) as at:
        done = asyncio.Event()

        @at.outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(max_attempts=1))
        async def mail(envelope: EventEnvelope[MoneyDeposited]) -> None:
            done.set()

        [id] = await at.dead(1)
        async with at.outbox.running(), asyncio.timeout(60):
            await at.send("retry", {"id": id})
            await done.wait()


async def test_two_shards_are_listed_together_and_operated_separately(tmp_path: Path) -> None:
    urls = {name: f"sqlite:///{tmp_path / name}.db" for name in ("one", "two")}
    async with Outbox(urls, namespace="app") as outbox:
        await outbox.migrate()
        for name, url in urls.items():
            async with Outbox(url, namespace="app") as single:
                store = Store(single, Look(url))
                await store.subscribe("mail", now=utc_now())
                await store.deposit(None, None)
                await store.fan_out(utc_now())
                await store.look.fetch(f"UPDATE {{event_notifications}} SET state = 'DEAD', model_type = '{name}'")
        async with browser(Dashboard(outbox, authorize=lambda request: Access.admin(ADA))) as client:
            for path in ("/", "/handlers", "/handlers/mail", "/notifications", "/keys", "/instances", "/shards"):
                assert (await client.get(path)).status_code == 200, path
            both = (await client.get("/dead?format=json")).json()
            assert sorted(row["shard"] for row in both["rows"]) == ["one", "one", "two", "two"]
            page = await client.get("/dead?shard=two")
            assert "Retry all 2" in words(page)
            assert re.search(r"<option[^>]* selected>two</option>", page.text)

            desk_of = Desk(outbox, Look(urls["two"]), client)
            await desk_of.confirmed("retry", {"handler": "mail", "shard": "two"})
            assert await desk_of.states() == {"PENDING": 2}
            assert await Look(urls["one"]).states() == {"DEAD": 2}
            await desk_of.confirmed("retry", {"handler": "mail"})
            assert await Look(urls["one"]).states() == {"PENDING": 2}
            assert "one, two" in words(await client.get(f"/operations/{(await desk_of.newest()).id}"))


# --- jobs ----------------------------------------------------------------------------------------


async def test_every_operation_on_a_job_is_recorded(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:

        @at.outbox.job("close-day", every="1h")
        async def close_day() -> None:
            raise ValueError("no mail server")

        job = {"job": "close-day"}
        async with at.outbox.running():
            await ran(at.outbox)
            assert "A process with the job starts a run within about a second" in words(
                await at.send("run-job-now", job)
            )
            answer = await at.confirmed("run-job-now", job, reason="the server is back")
            operation = await at.newest()
            assert answer.headers["location"] == f"/dead?did={operation.id}"
            assert (operation.kind, operation.actor, operation.reason) == ("run_job_now", ADA, "the server is back")
            await ran(at.outbox, failed=1)
        await fresh_overview(at.outbox)
        page = words(await at.client.get("/jobs"))
        assert "Job close-day ended FAILED" in page
        assert "ValueError: no mail server" in page
        assert "run_job_now by" not in page
        await at.confirmed("pause-job", job)
        assert "PAUSED" in words(await at.client.get("/jobs"))
        assert "the job “close-day”" in words(await at.client.get("/operations"))
        await at.send("unpause-job", job)
        assert [one.paused_date for one in await at.outbox.admin.jobs()] == [None]
        assert "Type close-day to confirm" in words(await at.confirmed("remove-job", job, typed="close"))
        await at.confirmed("remove-job", job, typed="close-day")
        assert [one.kind for one in await at.outbox.admin.operations()] == [
            "remove_job", "unpause_job", "pause_job", "run_job_now",
        ]  # fmt: skip
        assert "No jobs yet" in words(await at.client.get("/jobs"))


async def test_a_viewer_sees_jobs_without_error_messages_and_buttons(tmp_path: Path) -> None:
    async with desk(tmp_path, Access.viewer(ADA)) as at:

        @at.outbox.job("close-day", every="1h")
        async def close_day() -> None:
            raise ValueError("secret")

        async with at.outbox.running():
            await ran(at.outbox)
            await at.outbox.admin.run_job_now("close-day")
            await ran(at.outbox, failed=1)
        page, facts = await at.client.get("/jobs"), await at.client.get("/jobs?format=json")
        assert "ValueError" in page.text
        assert "secret" not in page.text + facts.text
        assert '<form class="operation"' not in page.text
        for name in ("run-job-now", "pause-job", "unpause-job", "remove-job"):
            assert (await at.send(name, {"job": "close-day"})).status_code == 403


async def test_a_run_is_cancelled_from_the_page_of_its_event(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        journal = Journal()

        @at.outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(base="1h"))
        async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await journal(envelope)
            await hang()

        async with at.outbox.running():
            await at.outbox.executor.execute(Emit((1,)))
            await journal.calls(1)
            [record] = await at.outbox.admin.list()
            page = await at.client.get(f"/events/{record.event_id}")
            assert "Cancel run…" in words(page)
            confirmation = await at.send("cancel", {"id": str(record.id)})
            assert f"Cancel the run of notification {record.id}?" in words(confirmation)
            assert "Run of the handler mail for event" in words(confirmation)
            assert "the retry policy decides what follows" in words(confirmation)

            await at.confirmed("cancel", {"id": str(record.id)}, reason="the bank is closed")

            operation = await at.newest()
            assert (operation.kind, operation.actor, operation.done, operation.reason) == (
                "cancel", ADA, 1, "the bank is closed",
            )  # fmt: skip
            [record] = await at.outbox.admin.list()
            assert record.errors[-1]["message"] == f"cancelled by {ADA}: the bank is closed"
            page = await at.client.get(f"/events/{record.event_id}")
            assert "Cancel run…" not in words(page), "the retry is due in an hour"
            assert "cancel 1 notification" in words(page), "the page lists the operation"


async def test_a_user_without_permission_sees_no_cancel_button(tmp_path: Path) -> None:
    async with desk(tmp_path, Access(ADA, can={"retry", "skip"})) as at:
        await at.dead(1)
        await at.look.fetch("UPDATE {event_notifications} SET state = 'PENDING'")
        [record] = await at.outbox.admin.list()
        page = await at.client.get(f"/events/{record.event_id}")
        assert "Skip…" in words(page)
        assert "Cancel run…" not in words(page)
        refused = await at.send("cancel", {"id": str(record.id)})
        assert refused.status_code in (403, 404)
