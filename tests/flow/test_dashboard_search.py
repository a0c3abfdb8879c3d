"""The search for any id, counts of states, options from process reports, and the timeline of an event."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from outboxio import Filter, Outbox
from outboxio.cli.app import app
from outboxio.dashboard import Access, Dashboard
from outboxio.model.notification import State
from outboxio.storage.protocols import InstanceReport
from outboxio.support.clock import utc_now
from tests.kit.app import Look
from tests.kit.busy import fill, open_shop
from tests.kit.dashboards import browser
from tests.kit.inside import database_of
from tests.kit.rows import EPOCH, EventRow, Row, insert

pytestmark = pytest.mark.usefixtures("patient_pages")

ADMIN = Access.admin("ada@example.org")
MODEL, REQUEST = "5f0e3f8a-1111-4222-8333-123456789abc", "req-7"


@pytest.fixture(scope="module")
def busy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("busy") / "shop.db"
    asyncio.run(fill(f"sqlite:///{path}", orders=30))
    return path


@asynccontextmanager
async def shop(file: Path, to: Path) -> AsyncGenerator[tuple[Outbox, httpx.AsyncClient]]:
    """A copy of the busy shop, and a browser in front of its dashboard."""
    shutil.copy(file, to / "shop.db")
    outbox = open_shop(f"sqlite:///{to / 'shop.db'}")
    async with outbox, browser(Dashboard(outbox, authorize=lambda request: ADMIN)) as client:
        yield outbox, client


@asynccontextmanager
async def stored(to: Path, *rows: Row | EventRow) -> AsyncGenerator[tuple[Outbox, httpx.AsyncClient]]:
    """A browser in front of a dashboard of these rows, in a process without handlers."""
    url = f"sqlite:///{to / 'rows.db'}"
    async with Outbox(url, namespace="app") as outbox:
        await outbox.migrate()
        for kind in (EventRow, Row):
            await insert(Look(url), [row for row in rows if isinstance(row, kind)])
        async with browser(Dashboard(outbox, authorize=lambda request: Access.viewer("grace"))) as client:
            yield outbox, client


def words_of(answer: httpx.Response) -> str:
    """The text of the main part of a page, without markup."""
    assert answer.status_code == 200, answer.text
    main = answer.text.partition("<main")[2].partition("</main>")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", main)).split())


# --- search ---------------------------------------------------------------------------------------


async def found_at(client: httpx.AsyncClient, text: str | UUID) -> str | None:
    """The page that a search opens; ``None`` for a list of results."""
    answer = await client.get("/search", params={"q": str(text)})
    assert answer.status_code in (200, 303), answer.text
    return answer.headers["location"] if answer.status_code == 303 else None


async def test_an_id_of_a_single_event_opens_its_page(tmp_path: Path) -> None:
    event = EventRow(action_id=uuid4(), model_id=MODEL, ordering_key="key-1", correlation_id=REQUEST)
    other = EventRow(action_id=uuid4(), model_id="other")
    notification = Row(event_id=event.id)
    async with stored(tmp_path, event, other, notification) as (_, client):
        page = f"/events/{event.id}"
        for text in (event.id, str(event.id).upper(), f" {event.id} "):
            assert str(await found_at(client, text)).lower() == page
        assert await found_at(client, notification.id) == f"/events/{notification.id}"
        for text in (event.action_id, MODEL, "key-1", REQUEST):
            assert await found_at(client, text) == page, text
        json_of = (await client.get("/search", params={"q": REQUEST, "format": "json"})).json()
    assert [(one["kind"], len(one["rows"])) for one in json_of["matches"]] == [("correlation id", 1)]


async def test_an_id_of_several_events_is_listed_by_kind(tmp_path: Path) -> None:
    both = [EventRow(correlation_id=REQUEST), EventRow(correlation_id=REQUEST), EventRow(ordering_key=REQUEST)]
    async with stored(tmp_path, *both) as (_, client):
        answer = await client.get("/search", params={"q": REQUEST})
        shown = words_of(answer)
        nothing = words_of(await client.get("/search", params={"q": "req-8"}))
        strange = [words_of(await client.get("/search", params={"q": text})) for text in ("x" * 900, "a\0b", "%", "")]

    assert "2 events with this correlation id" in shown
    assert "1 event with this ordering key" in shown
    assert f"/events?correlation={REQUEST}" in unescape(answer.text)
    assert "No results for req-8" in nothing
    assert ["No results for" in text for text in strange] == [True, True, True, False]


async def test_handler_names_and_operation_ids_are_found(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (outbox, client):
        operation = (await outbox.admin.operations(limit=1))[0].id
        assert await found_at(client, "ledger") == "/handlers/ledger"
        assert await found_at(client, operation) == f"/operations/{operation}"
        assert 'name="q" value="x"' in (await client.get("/search?q=x")).text
        assert 'action="/search"' in (await client.get("/handlers/ledger")).text


# --- states ---------------------------------------------------------------------------------------


async def test_states_are_shown_above_a_list_with_their_counts(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (outbox, client):
        counts = {str(state): int(await outbox.admin.count(Filter(states=(state,)))) for state in State}
        found = (await client.get("/notifications?format=json")).json()
        assert {state: count["number"] for state, count in found["states"].items()} == counts
        assert found["count"]["number"] == sum(counts.values())
        page = await client.get("/notifications")
        assert f"DEAD {counts['DEAD']} " in words_of(page)
        assert 'href="/notifications?state=DEAD"' in page.text

        of_handler = (await client.get("/notifications?handler=ledger&state=DEAD&format=json")).json()
        assert of_handler["states"]["DEAD"]["number"] == of_handler["count"]["number"] < counts["DEAD"]
        assert of_handler["states"]["SUCCEEDED"]["number"] > 0
        chosen = (await client.get("/notifications?handler=ledger&state=DEAD")).text
        assert 'href="/notifications?handler=ledger&amp;state=FAILED"' in chosen
        assert len(re.findall(r"state=DEAD\" title=\"[^\"]*\" aria-current", chosen)) == 1


async def test_the_dead_letter_filter_has_both_states_checked(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (_, client):
        both, one = (await client.get("/dead")).text, (await client.get("/dead?state=EXPIRED")).text
    ticked = r'value="(DEAD|EXPIRED)" checked'
    assert (re.findall(ticked, both), re.findall(ticked, one)) == (["DEAD", "EXPIRED"], ["EXPIRED"])


async def test_a_state_that_is_slow_to_count_shows_a_question_mark(
    busy_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outboxio.dashboard.lists.PATIENCE", 0)
    async with shop(busy_file, tmp_path) as (_, client):
        assert "DEAD ?" in words_of(await client.get("/notifications"))


# --- ids ------------------------------------------------------------------------------------------


async def test_a_list_shows_short_uuids_with_a_copy_button(tmp_path: Path) -> None:
    event = EventRow(model_id=MODEL)
    row = Row(event_id=event.id, model_id=MODEL, state="DEAD", errors='[{"type": "E", "message": "m", "attempt": 1}]')
    async with stored(tmp_path, event, row) as (_, client):
        page = (await client.get("/dead")).text
    assert "…56789abc" in page
    assert f'title="{MODEL}"' in page
    assert page.count('class="copy"') == 2  # of the event and of the model
    assert f'data-copy="{event.id}"' in page
    assert page.index(">Last error<") < page.index(">Event<")


# --- options --------------------------------------------------------------------------------------


async def test_options_come_from_the_newest_reporting_process(tmp_path: Path) -> None:
    async with stored(tmp_path) as (outbox, client):
        now, reports = utc_now(), database_of(outbox).reports
        known = ((9, "old", {"timeout": "1s"}), (5, "new", {"timeout": "5m"}), (1, "older code", None))
        for age, name, options in known:
            content: dict[str, Any] = {"handlers": {"mail": {}}}
            content |= {} if options is None else {"options": {"mail": options}}
            await reports.write_report("app", InstanceReport(
                instance=name, version="7.1", started_date=now - timedelta(minutes=age), last_seen_date=now,
                delay_seconds=10, report=msgspec.Raw(json.dumps(content).encode()),
            ))  # fmt: skip
        await Look(f"sqlite:///{tmp_path / 'rows.db'}").fetch(
            "INSERT INTO {subscriptions} (namespace, handler_name, event_type, topic, aliases, "
            f"priority, ordered, last_seen_date) VALUES ('app', 'mail', 'Paid', '', '[]', 0, 0, '{now}')"
        )
        [status] = await outbox.admin.handlers()
        shown = words_of(await client.get("/handlers/mail"))
        at = ("--database", f"sqlite:///{tmp_path / 'rows.db'}", "--namespace", "app")
        listed = await asyncio.to_thread(CliRunner().invoke, app, ["handlers", *at, "mail"])
        unknown = await asyncio.to_thread(CliRunner().invoke, app, ["handlers", *at, "mial"])
    assert (status.options, status.options_from) == ({"timeout": "5m"}, "new")
    assert "by new (7.1)" in listed.stdout
    assert "timeout=5m" in listed.stdout
    assert "no process has registered a handler 'mial': did you mean 'mail'" in unknown.output
    assert "timeout 5m Options of process new, outboxio 7.1" in shown


# --- timeline -------------------------------------------------------------------------------------


def later(seconds: float) -> Any:
    return EPOCH + timedelta(seconds=seconds)


def failure(attempt: int, seconds: float) -> dict[str, object]:
    return {"type": "TimeoutError", "message": "secret", "attempt": attempt, "time": later(seconds).isoformat()}


async def test_a_timeline_shows_what_is_known_of_each_attempt(tmp_path: Path) -> None:
    event = EventRow(action_name="Pay", delivered=True)
    effect = EventRow(event_type="InvoiceMade", action_name="Invoice", causation_id=event.id, event_date=later(6))
    common = {"event_id": event.id, "created_date": later(0.5)}
    rows = [
        Row(handler_name="mail", state="SUCCEEDED", attempts=2, updated_date=later(5), **common,
            errors=json.dumps([failure(1, 2)])),
        Row(handler_name="pdf", state="DEAD", attempts=12, updated_date=later(90), **common,
            errors=json.dumps([failure(11, 60), {**failure(12, 90), "ran": 10.0}])),
        Row(handler_name="late", state="FAILED", attempts=0, event_id=event.id, created_date=later(30),
            next_retry_at=later(1e9)),
    ]  # fmt: skip
    async with stored(tmp_path, event, effect, *rows) as (_, client):
        answer = await client.get(f"/events/{event.id}")
        steps = (await client.get(f"/events/{event.id}?format=json")).json()["timeline"]

    shown = [(one["after"], one["handler"], one["what"], one["detail"]) for one in steps]
    assert shown == [
        (0.0, None, "emitted", "by Pay"),
        (None, "pdf", "10 earlier attempts", "times not kept: a notification keeps its newest errors"),
        (0.5, None, "fanned out", "to 2 handlers"),
        (2.0, "mail", "attempt 1 failed", "TimeoutError, 1.5 s after fan-out"),
        (5.0, "mail", "attempt 2 succeeded", "3.0 s after the previous attempt"),
        (6.0, None, "caused InvoiceMade", "by Invoice"),
        (30.0, None, "added later", "to late"),
        (60.0, "pdf", "attempt 11 failed", "TimeoutError"),
        (90.0, "pdf", "attempt 12 failed, DEAD", "TimeoutError, waited 20 s after the previous attempt, ran 10 s"),
        (1e9, "late", "next run", ""),
    ]
    assert "attempt 12 failed, DEAD" in words_of(answer)
    assert answer.text.count('<svg class="lane"') == 3
    assert "secret" not in answer.text
