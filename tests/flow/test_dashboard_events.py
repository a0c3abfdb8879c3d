"""The pages of events and actions: JSON, permissions, and hostile data in every field."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from outboxio import Outbox
from outboxio.dashboard import Access, Dashboard
from outboxio.dashboard.pages import PAGES
from outboxio.dashboard.showing.documents import MAX_SHOWN
from tests.kit.app import Look
from tests.kit.busy import fill, open_shop
from tests.kit.dashboards import browser, send_form
from tests.kit.rows import EventRow, Row, at, insert

pytestmark = pytest.mark.usefixtures("patient_pages")

ADMIN = Access.admin("ada@example.org")
VIEWER = Access.viewer("grace@example.org")
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d")
NEVER = "no-such-thing"


@pytest.fixture(scope="module")
def busy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a busy shop, which tests copy."""
    path = tmp_path_factory.mktemp("busy") / "shop.db"
    asyncio.run(fill(f"sqlite:///{path}", orders=40))
    return path


@asynccontextmanager
async def shop(file: Path, to: Path, access: Access = ADMIN) -> AsyncGenerator[tuple[Outbox, httpx.AsyncClient]]:
    """A copy of the busy shop, and a browser in front of its dashboard."""
    copy = to / f"{uuid4()}.db"
    shutil.copy(file, copy)
    outbox = open_shop(f"sqlite:///{copy}")
    async with outbox, browser(Dashboard(outbox, authorize=lambda request: access)) as client:
        yield outbox, client


@asynccontextmanager
async def stored(
    to: Path, *rows: Row | EventRow, access: Access = ADMIN, **options: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """A browser in front of a dashboard of these rows."""
    url = f"sqlite:///{to / 'rows.db'}"
    async with Outbox(url, namespace="app", **options) as outbox:
        await outbox.migrate()
        for kind in (EventRow, Row):
            await insert(Look(url), [row for row in rows if isinstance(row, kind)])
        links = {"trace": "https://traces.example.org/{trace_id}"}
        async with browser(Dashboard(outbox, authorize=lambda request: access, links=links)) as client:
            yield client


async def page_of(client: httpx.AsyncClient, path: str, status: int = 200) -> str:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    return answer.text


def words_of(page: str) -> str:
    """The text of the main part of a page, without markup."""
    main = page.partition("<main")[2].partition("</main>")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", main)).split())


async def facts_of(client: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    answer = await client.get(path + ("&" if "?" in path else "?") + "format=json")
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.text, parse_float=str)


async def dead_of(outbox: Outbox, handler: str) -> Any:
    [record] = await outbox.admin.list(state="DEAD", handler=handler, limit=1)
    return record


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a JSON document, each with the name of its field."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, name)
    else:
        yield name, value


# --- the pages -----------------------------------------------------------------------------------


async def test_an_event_shows_handlers_errors_chain_and_operations(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (outbox, client):
        dead = await dead_of(outbox, "ledger")
        await send_form(client, "/operations/retry", {"id": str(dead.id), "reason": "the account is open"})
        await outbox.drain(timeout=60)
        page = await page_of(client, f"/events/{dead.event_id}")
        words, found = words_of(page), await facts_of(client, f"/events/{dead.event_id}")

        assert {row["handler_name"] for row in found["notifications"]} == {"crm-sync", "invoice-pdf", "ledger"}
        [ledger] = [row for row in found["notifications"] if row["handler_name"] == "ledger"]
        assert "Failed permanently. It stays as it is until someone retries or skips it." in words
        error = ledger["errors"][0]  # the newest
        assert error["type"] in words
        assert error["message"] in words
        assert "Traceback (most recent call last)" in words
        assert "the account is open" in words

        await outbox.admin.resume("ledger", dead.ordering_key, actor="grace", reason="the first one is lost")
        found = await facts_of(client, f"/events/{dead.event_id}")
        assert [(one["operation"]["kind"], one["operation"]["actor"]) for one in found["operations"]] == [
            ("resume", "grace"), ("retry", "ada@example.org"),
        ]  # fmt: skip

        assert [(node["depth"], node["event_type"]) for node in found["tree"]["nodes"]][:2] == [
            (0, "OrderPlaced"), (1, "PaymentTaken"),
        ]  # fmt: skip
        assert [node["event_id"] for node in found["tree"]["nodes"] if node["is_requested"]] == [str(dead.event_id)]
        assert page.count('aria-current="true"') == 1
        root = found["tree"]["nodes"][0]["event_id"]
        chain = (await facts_of(client, f"/events/{root}"))["tree"]["nodes"]
        assert [node["event_id"] for node in chain] == [node["event_id"] for node in found["tree"]["nodes"]]
        assert chain[0]["worst"] == "PENDING"  # the paused handler

        # the id of a notification leads to its event, and the row is marked
        marked = await facts_of(client, f"/events/{dead.id}")
        assert [row["id"] for row in marked["notifications"] if row["is_requested"]] == [str(dead.id)]
        assert "is not the id of an event" in words_of(await page_of(client, "/events/x", 404))
        assert "There is no event" in words_of(await page_of(client, f"/events/{uuid4()}", 404))


async def test_lists_of_events_and_actions_continue_with_the_same_filter(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (outbox, client):
        for path, type_of in (("/events", lambda row: row["event_type"]), ("/actions", lambda row: row["name"])):
            seen: list[str] = []
            at_page = f"{path}?since=2h"
            while at_page:
                page = await page_of(client, at_page)
                rows = (await facts_of(client, at_page))["rows"]
                seen += [row["id"] for row in rows]
                assert all(row["id"] in page and type_of(row) in page for row in rows)
                older = re.search(r'rel="next" href="([^"]+)"', page)
                at_page = unescape(older[1]) if older else ""
                assert not at_page or "since=2h" not in at_page  # so that the list stays the same
            assert len(seen) == len(set(seen))
            assert len(seen) == len(await outbox.admin.events(limit=1000))  # each action has one event
        one = (await facts_of(client, "/events?type=OrderPlaced&key=customer-007"))["rows"]
        assert {(row["event_type"], row["ordering_key"]) for row in one} == {("OrderPlaced", "customer-007")}
        words = words_of(await page_of(client, "/events?type=OrderPlaced&key=none"))
        assert "No stored event matches the filter." in words
        assert "events of the type “OrderPlaced”, with the key “none”" in words
        assert "did you mean 'type'" in words_of(await page_of(client, "/events?typ=x", 400))
        assert "did you mean" in words_of(await page_of(client, "/events?type=OrderPlace", 400))


async def test_an_action_shows_its_parameters_and_events(tmp_path: Path) -> None:
    busy, idle = uuid4(), uuid4()
    rows = [
        *(EventRow(action_id=busy, action_name="Import", action_params='{"file": "a.csv"}') for _ in range(25)),
        EventRow(action_id=idle, action_name="Look", event_type=None, payload=None),
    ]
    async with stored(tmp_path, *rows) as client:
        listed = await facts_of(client, "/actions")
        assert [(row["name"], len(row["events"]), row["is_complete"]) for row in listed["rows"]] == [
            ("Look", 0, True), ("Import", 20, False),
        ]  # fmt: skip
        words = words_of(await page_of(client, "/actions"))
        assert "no events" in words
        assert "all 20+ events" in words
        found = await facts_of(client, f"/actions/{busy}")
        assert (len(found["events"]), found["params"]["value"]) == (25, {"file": "a.csv"})
        assert '"file": "a.csv"' in words_of(await page_of(client, f"/actions/{busy}"))
        assert "The action emitted no events." in words_of(await page_of(client, f"/actions/{idle}"))
        assert "There is no action" in words_of(await page_of(client, f"/actions/{uuid4()}", 404))
        [sentinel] = (await facts_of(client, f"/events?action={idle}"))["rows"]
        assert "emitted nothing" in words_of(await page_of(client, f"/events/{sentinel['id']}"))


async def test_an_event_is_shown_although_reading_its_chain_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = EventRow(correlation_id="req-1")
    async with stored(tmp_path, cause, EventRow(causation_id=cause.id)) as client:
        monkeypatch.setattr(import_module("outboxio.dashboard.pages.events"), "TREE_PATIENCE", 0.0)
        words = words_of(await page_of(client, f"/events/{cause.id}"))
        assert "could not be read within a second. See the events with the same correlation id" in words
        assert (await facts_of(client, f"/events/{cause.id}"))["tree"] is None


async def test_each_state_has_an_explanation(tmp_path: Path) -> None:
    event, now = EventRow(), datetime.now(UTC).replace(tzinfo=None)
    soon, long_ago = now + timedelta(hours=3), now - timedelta(hours=3)
    cases = {
        "FAILED": (soon, "No process has a handler FAILED : deploy it, or add aliases={'FAILED'} to its successor."),
        "PENDING": (long_ago, "No process has a handler PENDING :"),
        "BLOCKED": (now, "No process has a handler BLOCKED :"),
        "DYING": (soon, "No process has a handler DYING :"),
        "EXPIRED": (now, "Failed permanently. It stays as it is until someone retries or skips it."),
        "SKIPPED": (now, "Skipped: the handler will not handle this event."),
    }
    rows = [
        Row(event_id=event.id, handler_name=state, state=state, next_retry_at=due, ordering_key="ada")
        for state, (due, _) in cases.items()
    ]
    async with stored(tmp_path, event, *rows) as client:
        words = words_of(await page_of(client, f"/events/{event.id}"))
        for state, (_, explanation) in cases.items():
            assert explanation in words, state
        found = (await facts_of(client, f"/events/{event.id}"))["notifications"]
        planned = {row["handler_name"]: row["is_overdue"] for row in found if row["due"]}
        assert planned == {"FAILED": False, "PENDING": True, "DYING": False}


async def test_actions_and_events_of_several_shards_are_merged(tmp_path: Path) -> None:
    urls = {name: f"sqlite:///{tmp_path / name}.db" for name in ("one", "two")}
    rows = [EventRow(action_id=uuid4(), action_name=f"Deposit{number}") for number in range(30)]
    async with Outbox(urls, namespace="app") as outbox:
        await outbox.migrate()
        for number, url in enumerate(urls.values()):
            await insert(Look(url), [row for place, row in enumerate(rows) if (place % 3 == 0) == (number == 0)])
        for query in (outbox.admin.actions, outbox.admin.events):
            found, after = [], None
            while True:
                page = await query(None, 4, after)
                found += page
                after = page.next
                if after is None:
                    break
            assert [each.shard for each in found] == ["two" if n % 3 else "one" for n in reversed(range(30))]
        async with browser(Dashboard(outbox, authorize=lambda request: ADMIN)) as client:
            for path in ("/actions", "/events"):
                assert {row["shard"] for row in (await facts_of(client, path))["rows"]} == {"one", "two"}
                assert {row["shard"] for row in (await facts_of(client, f"{path}?shard=two"))["rows"]} == {"two"}
            of_two = (await facts_of(client, "/events?shard=two"))["rows"][0]["id"]
            assert (await facts_of(client, f"/events/{of_two}"))["event"]["shard"] == "two"


async def test_a_large_chain_is_drawn_up_to_a_limit(tmp_path: Path) -> None:
    deep: list[EventRow] = [EventRow(event_type="Step")]
    for hops in range(1, 150):
        deep.append(EventRow(event_type="Step", causation_id=deep[-1].id, hops=hops))
    wide = [EventRow(event_type="Side", causation_id=deep[0].id) for _ in range(100)]
    async with stored(tmp_path, *deep, *wide) as client:
        found = (await facts_of(client, f"/events/{deep[0].id}"))["tree"]
        assert (len(found["nodes"]), found["is_complete"], found["is_purged_above"]) == (200, False, False)
        page = await page_of(client, f"/events/{deep[0].id}")
        assert "the first 200 events of a larger chain" in words_of(page)
        assert len(page) < 200_000


# --- facts as JSON -------------------------------------------------------------------------------


async def test_every_page_has_its_facts_as_json(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (outbox, client):
        dead = await dead_of(outbox, "ledger")
        operation = (await outbox.admin.operations(1))[0]
        ids = {"event": dead.event_id, "action": dead.action_id, "operation": operation.id}
        for route in PAGES:
            if route.name == "payload":
                continue
            name = "OrderPlaced" if route.name == "event_type" else "ledger"
            path = route.path.replace("{id}", str(ids.get(route.name))).replace("{name:path}", name)
            page, facts = unescape(await page_of(client, path)), await facts_of(client, path)
            values = list(leaves(facts))
            for name, value in values:
                if isinstance(value, str) and MOMENT.match(value):
                    assert value.endswith("Z"), (route.name, name, value)
            shown = {"handler_name", "event_type", "model_id", "fingerprint", "action_name", "actor"}
            for name, value in values:
                if name in shown and isinstance(value, str):
                    assert value in page, (route.name, name, value)
            if route.name in ("dead", "notifications", "events", "actions"):
                assert len(facts["rows"]) > 5, route.name
            assert f"{client.base_url.join(path).path}?format=json" in page or "format=json" in page


async def test_numbers_in_documents_keep_all_digits(tmp_path: Path) -> None:
    payload = '{"big": 123456789012345678901234567890, "total": 10.90, "tiny": 1e-400, "small": -0.0}'
    event = EventRow(payload=payload, action_params='{"n": 9007199254740993}', headers='{"x": 1.50}')
    async with stored(tmp_path, event) as client:
        page, text = (
            await page_of(client, f"/events/{event.id}"),
            (await client.get(f"/events/{event.id}?format=json")).text,
        )
        for digits in ("123456789012345678901234567890", "10.90", "1e-400", "-0.0", "9007199254740993", "1.50"):
            assert digits in words_of(page), digits
            assert digits in text, digits
        saved = await client.get(f"/events/{event.id}/payload")
        assert saved.text == payload
        assert saved.headers["content-disposition"] == f'attachment; filename="{event.id}.json"'
        assert saved.headers["x-content-type-options"] == "nosniff"
        assert (saved.headers["content-type"], saved.headers["cache-control"]) == ("application/json", "no-store")
        assert (await client.get(f"/events/{uuid4()}/payload")).status_code == 404


# --- who sees what -------------------------------------------------------------------------------

SECRET = "4111-1111"


def secret_rows() -> tuple[EventRow, Row]:
    errors = json.dumps([
        {"time": "2030-01-01T00:00:00", "type": "CardError", "message": f"refused {SECRET}", "attempt": 1,
         "traceback": f"in pay: {SECRET}"},
    ])  # fmt: skip
    parts = {
        "payload": json.dumps({"card": SECRET}), "action_params": json.dumps({"card": SECRET}),
        "headers": json.dumps({"card": SECRET, "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}),
    }  # fmt: skip
    event = EventRow(model_id="7", model_type="Wallet", correlation_id="req-1", **parts)
    return event, Row(event_id=event.id, action_id=event.action_id, state="DEAD", errors=errors, **parts)


def paths_of(event: EventRow, row: Row) -> list[str]:
    """The address of every page, for rows of this event."""
    ids = {"event": event.id, "action": event.action_id, "operation": uuid4()}
    names = {"handler": row.handler_name, "event_type": str(event.event_type)}
    return [
        route.path.replace("{id}", str(ids.get(route.name))).replace("{name:path}", names.get(route.name, ""))
        for route in PAGES
        if route.name not in ("payload", "operation")
    ]


async def test_without_the_payloads_permission_only_types_and_ids_are_shown(tmp_path: Path) -> None:
    event, row = secret_rows()
    async with stored(tmp_path, event, row, access=VIEWER) as client:
        for path in paths_of(event, row):
            for query in ("", "?format=json"):
                answer = await client.get(path + query)
                assert answer.status_code == 200, path
                assert SECRET not in answer.text, path
        words, facts = (
            words_of(await page_of(client, f"/events/{event.id}")),
            await facts_of(client, f"/events/{event.id}"),
        )
        assert "grace@example.org does not have the right payloads" in words
        assert all(part in words for part in ("CardError", "req-1", "Wallet 7", "DEAD", "ab" * 16))
        assert (facts["payload"], facts["action_params"], facts["headers"], facts["may_read"]) == (
            None,
            None,
            None,
            False,
        )
        assert facts["notifications"][0]["errors"][0]["message"] is None
        assert (await client.get(f"/events/{event.id}/payload")).status_code == 403


async def test_redacted_values_are_on_no_page(tmp_path: Path) -> None:
    event, row = secret_rows()
    given: list[str] = []

    def redact(text: str) -> str:
        given.append(text)
        return text.replace(SECRET, "****")

    async with stored(tmp_path, event, row, redact=redact) as client:
        for path in [*paths_of(event, row), f"/events/{event.id}/payload"]:
            for query in ("", "?format=json"):
                answer = await client.get(path + query)
                assert answer.status_code == 200, path
                assert SECRET not in answer.text, path
        assert '"card": "****"' in words_of(await page_of(client, f"/events/{event.id}"))
        assert '{"card":"4111-1111"}' in given  # without spaces, as redact is given all documents
        href = f"https://traces.example.org/{'ab' * 16}"
        assert f'href="{href}"' in await page_of(client, f"/events/{event.id}")


# --- hostile data --------------------------------------------------------------------------------

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
HOSTILE = [
    SCRIPT,
    "'\"><svg onload=alert(1)>{{7*7}}{% raw %}",
    "safe\u202egnp.exe\u2066\u200f\ufeff",
    "א" * 40 + "ب" * 40,
    "line\nline\r\n\ttab\x07\x1b[31m",
    "W" * 255,
    "../../etc/passwd?x=1&y=2#z",
    "javascript:alert(1)",
    "zażółć 🙂 日本語",
]


def hostile_rows(text: str) -> tuple[EventRow, Row]:
    document = json.dumps({text: [text, {"deep": text}]}, ensure_ascii=False)
    shared = {
        "payload": document, "action_params": document, "headers": json.dumps({"traceparent": text, text: text}),
        "action_name": text, "model_id": text, "model_type": text, "event_type": text, "ordering_key": text,
        "correlation_id": text, "action_id": uuid4(),
    }  # fmt: skip
    errors = json.dumps([{"time": text, "type": text, "message": text, "traceback": text, "attempt": text}, text, None])
    event = EventRow(topic=text, source=text, event_date=at(1), **shared)
    return event, Row(event_id=event.id, handler_name=text, state="DEAD", errors=errors, **shared)


async def test_hostile_text_in_every_field_is_harmless(tmp_path: Path) -> None:
    pairs = [hostile_rows(text) for text in HOSTILE]
    async with stored(tmp_path, *(row for pair in pairs for row in pair)) as client:
        for (event, row), text in zip(pairs, HOSTILE, strict=True):
            await refuse_harm(client, f"/events/{event.id}")
            await refuse_harm(client, f"/actions/{event.action_id}")
            found = await facts_of(client, f"/events/{event.id}")
            assert found["event"]["event_type"] == text
            assert found["payload"]["value"] == {text: [text, {"deep": text}]}
            assert [error["type"] for error in found["notifications"][0]["errors"]] == ["Unknown", "Unknown", text]
            assert found["trace_id"] is None
            # links lead to the same value, and operations to the same row
            page = await page_of(client, f"/events/{event.id}")
            [same] = {unescape(link) for link in re.findall(r'href="(/events\?key=[^"]+)"', page)}
            [of_handler] = {unescape(link) for link in re.findall(r'href="(/handlers/[^"]+)"', page)}
            if "\n" not in text:  # a path has a single line
                await refuse_harm(client, of_handler)
                assert (await facts_of(client, of_handler))["handler_name"] == text
            assert [each["id"] for each in (await facts_of(client, same))["rows"]] == [str(event.id)], text
            await send_form(client, "/operations/retry", {"id": str(row.id), "reason": text, "back": same})
            [order] = (await facts_of(client, f"/events/{event.id}"))["operations"]
            assert (order["operation"]["done"], order["operation"]["reason"]) == (1, text)
            await refuse_harm(client, f"/operations/{order['operation']['id']}")
            await refuse_harm(client, f"/events/{event.id}")
        for route in PAGES:
            if "{" not in route.path:
                await refuse_harm(client, route.path)


async def refuse_harm(client: httpx.AsyncClient, path: str) -> None:
    """The page and its JSON respond, are small, and contain no markup or invisible character of a text."""
    answer = await client.get(path)
    assert answer.status_code == 200, (path, answer.text)
    main = answer.text.partition("<main")[2].partition("<footer")[0]
    assert not re.search(r"<(script|img|svg onload)", main), path
    assert not re.search(r'(href|action|src)="\s*javascript:', main), path
    shown = re.sub(r' value="[^"]*"', "", main)  # a form sends the exact text back
    assert not re.search("[\u202e\u2066\u200f\ufeff\x07\x1b]", shown), path
    assert "{{7*7}}" in main or "49{%" not in main, path
    assert len(answer.text) < 300_000, path
    assert (await client.get(f"{path}?format=json")).status_code == 200, path


async def test_large_or_malformed_documents_are_shown_up_to_a_limit(tmp_path: Path) -> None:
    large = EventRow(payload=json.dumps({"text": "x" * 10_000_000}))
    shared = {"action_id": uuid4(), "action_params": large.payload, "headers": large.payload}
    events = [
        large,
        EventRow(payload='{"half": "\\ud83d", "nul": "\\u0000"}'),
        EventRow(payload="{broken <script>", headers="[1]", action_params="null"),
        EventRow(payload=json.dumps({"a" * MAX_SHOWN: 1})),
        EventRow(payload="[" * 5000 + "]" * 5000),
        EventRow(payload="{}", **shared),
    ]  # fmt: skip
    rows = [
        Row(event_id=large.id, handler_name=f"h{number}", payload=large.payload, state="DEAD") for number in range(3)
    ]
    async with stored(tmp_path, *events, *rows) as client:
        for path in ("/events", "/actions", "/dead", "/notifications", *(f"/events/{event.id}" for event in events)):
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            assert len(answer.text) < 250_000, path
            assert "<script>" not in answer.text.partition("<main")[2], path
            assert len((await client.get(f"{path}?format=json")).content) < 300_000, path
        assert "data-refreshes" not in await page_of(client, f"/events/{large.id}")
        assert "data-refreshes" in await page_of(client, f"/events/{events[1].id}")
        assert "The first 64 KB of 9,765 KB." in words_of(await page_of(client, f"/events/{large.id}"))
        assert len((await client.get(f"/events/{large.id}/payload")).content) == len(large.payload or "")
        assert "\\ud83d" in words_of(await page_of(client, f"/events/{events[1].id}"))
        assert "{broken <script>" in words_of(await page_of(client, f"/events/{events[2].id}"))


async def test_malformed_bytes_of_another_tool_break_no_page(tmp_path: Path) -> None:
    event = EventRow(model_id="7")
    async with stored(tmp_path, event, Row(event_id=event.id, state="DEAD")) as client:
        look, texts = (
            Look(f"sqlite:///{tmp_path / 'rows.db'}"),
            {"model_id": "61eda080ff", "payload": "7b2261ff223a317d"},
        )
        for table in ("events", "event_notifications"):  # a lone surrogate, and a byte that is invalid in UTF-8
            for column, text in texts.items():
                await look.fetch(f"UPDATE {{{table}}} SET {column} = CAST(x'{text}' AS TEXT)")
        for path in ("/events", "/actions", "/dead", "/notifications", f"/events/{event.id}"):
            await refuse_harm(client, path)
        found = await facts_of(client, f"/events/{event.id}")
        assert found["event"]["model_id"].startswith("a\ufffd")
        assert found["payload"]["value"] == {"a\ufffd": 1}
