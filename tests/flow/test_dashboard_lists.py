"""The list pages: handlers, a handler, dead letters, notifications, keys, instances, shards, operations."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from outboxio import Filter, Outbox
from outboxio.dashboard import Access, Dashboard
from outboxio.storage.protocols import InstanceReport
from outboxio.support.clock import utc_now
from tests.kit.app import eventually
from tests.kit.busy import fill, open_shop
from tests.kit.dashboards import browser
from tests.kit.inside import database_of

pytestmark = pytest.mark.usefixtures("patient_pages")

DEAD = Filter(states=("DEAD", "EXPIRED"))


@pytest.fixture(scope="module")
def busy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a busy shop, which tests copy."""
    path = tmp_path_factory.mktemp("busy") / "shop.db"
    asyncio.run(fill(f"sqlite:///{path}", orders=60))
    return path


@asynccontextmanager
async def shop(file: Path, to: Path, access: Access | None = None) -> AsyncGenerator[tuple[Outbox, httpx.AsyncClient]]:
    """A copy of the busy shop, and a browser in front of its dashboard."""
    shutil.copy(file, to / "shop.db")
    allowed = access or Access.admin("ada@example.org")
    outbox = open_shop(f"sqlite:///{to / 'shop.db'}")
    async with outbox, browser(Dashboard(outbox, authorize=lambda request: allowed)) as client:
        yield outbox, client


async def text(client: httpx.AsyncClient, path: str, status: int = 200) -> str:
    """The text of a page, without its markup."""
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    main = answer.text.partition("<main")[2].partition("</main>")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", main)).split())


async def facts(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(path + ("&" if "?" in path else "?") + "format=json")
    assert answer.status_code == 200, answer.text
    return answer.json()


def _plain(words: str) -> str:
    return words.replace("`", "").replace(" ", "")


async def test_handlers_are_listed_worst_first_with_their_problems(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (_, client):
        found = await facts(client, "/handlers")
        names = [one["handler_name"] for one in found["handlers"]]
        levels = [one["level"] for one in found["handlers"]]
        assert levels == sorted(levels)  # degraded, ok
        assert "ledger" in names[: levels.count("degraded")]
        assert {finding["handler"] for finding in found["findings"]} <= set(names)
        page = await text(client, "/handlers")
        assert "parked by a dead letter" in page
        assert all(_plain(finding["text"]) in _plain(page) for finding in found["findings"])
        assert "paused" in page

        part = await facts(client, "/handlers?name=INVOICE")
        assert sorted(one["handler_name"] for one in part["handlers"]) == ["invoice-pdf", "mail-invoice"]
        assert part["of"] == len(names)
        assert "No handler's name contains this text." in await text(client, "/handlers?name=nobody")


async def test_a_handler_page_has_chart_errors_keys_options_and_operations(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (outbox, client):
        await outbox.admin.pause("ledger", actor="grace", reason="the bank is closed")
        found = await facts(client, "/handlers/ledger")
        assert found["history"]["total"]["succeeded"] > 0
        assert len(found["history"]["points"]) == 60
        assert [group["error"] for group in found["groups"]] == ["LookupError: there is no account of *"]
        assert {key["ordering_key"] for key in found["keys"]} <= {f"customer-{n:03}" for n in (3, 4, 5)}
        assert found["keys"]
        assert (found["registered"]["ordered"], found["registered"]["delivery"]) == (True, "at_least_once")
        assert [one["kind"] for one in found["operations"]] == ["pause"]
        assert len((await facts(client, "/handlers/ledger?span=24h"))["history"]["points"]) == 96

        page = await text(client, "/handlers/ledger")
        for words in ("Unpause", "Replay…", "Backfill…", "Unsubscribe…", "ordered by key", "max_attempts 1",
                      "pause by grace the bank is closed", "Duration of a run, at most"):  # fmt: skip
            assert words in page, words
        assert "No notification of this handler is waiting for a retry" in await text(client, "/handlers/receipt")
        assert "did you mean 'ledger'" in await text(client, "/handlers/ledgr", 404)
        assert "Unknown span 7d." in await text(client, "/handlers/ledger?span=7d", 400)


async def test_a_handler_without_local_code_is_shown(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (_, client):
        found = await facts(client, "/handlers/legacy-tracking")
        assert found["registered"] is None
        assert found["status"]["due"] + found["status"]["waiting"] > 0
        assert "no running process reports them" in await text(client, "/handlers/legacy-tracking")


async def test_dead_letters_are_grouped_and_listed_newest_first(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (outbox, client):
        number = int(await outbox.admin.count(DEAD))
        found = await facts(client, "/dead")
        assert found["count"] == {"number": number, "is_complete": True}
        assert sum(group["count"] for group in found["grouped"]["groups"]) == number
        errors = [group["error"] for group in found["grouped"]["groups"]]
        assert "ConnectionError: pdf:* refused the connection for order *" in errors
        dates = [row["updated_date"] for row in found["rows"] if row["handler_name"] == "invoice-pdf"]
        assert dates == sorted(dates, reverse=True)

        group = next(one for one in found["grouped"]["groups"] if one["handler_name"] == "ledger")
        part = await client.get("/dead", params={**group["filter"], "format": "json"})
        assert part.json()["count"]["number"] == group["count"]

        page = await text(client, "/dead")
        assert f"Retry all {number}" in page
        assert f"Skip all {number}" in page
        assert "No dead letters match the filter." in await text(client, "/dead?handler=receipt")
        assert "dead letters are DEAD or EXPIRED" in await text(client, "/dead?state=PENDING", 400)
        assert "did you mean 'ledger'" in await text(client, "/dead?handler=ledgr", 400)
        assert "no filter 'handle'" in await text(client, "/dead?handle=ledger", 400)


async def test_older_rows_follow_without_gaps_under_a_time_filter(
    busy_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("outboxio.dashboard.pages.notifications"), "ROWS", 5)
    async with shop(busy_file, tmp_path) as (_, client):
        for start in ("/dead?since=90d", "/notifications?handler=crm-sync&since=90d"):
            path: str | None = start
            seen: list[str] = []
            while path is not None:
                answer = await client.get(path)
                assert answer.status_code == 200, answer.text
                seen += re.findall(r'<tr data-key="([0-9a-f-]{36})"', answer.text)
                older = re.search(r'rel="next" href="([^"]+)"', answer.text)
                path = None if older is None else unescape(older[1])
            assert len(seen) == len(set(seen)) == (await facts(client, start))["count"]["number"] > 10


async def test_notifications_are_filtered_by_url_parameters(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (_, client):
        found = await facts(client, "/notifications?state=failed&handler=crm-sync")
        assert {row["state"] for row in found["rows"]} == {"FAILED"}
        assert found["rows"][0]["error"] == "crm.example.com did not answer within 10 s"
        assert found["filter"] == {"state": ["FAILED"], "handler": ["crm-sync"]}
        page = await text(client, "/notifications?state=SUCCEEDED")
        assert "SUCCEEDED notifications" in page
        assert "Retry all that match" not in page
        assert "No notification matches the filter." in await text(client, "/notifications?model=nobody")
        assert "expected a date" in await text(client, "/notifications?since=yesterday", 400)
        assert "There is no shard" in await text(client, "/notifications?shard=second", 400)


async def test_a_parked_key_shows_what_parks_it(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (_, client):
        found = await facts(client, "/keys")
        assert found["is_all"]
        assert {key["handler_name"] for key in found["keys"]} == {"ledger"}
        page = await text(client, "/keys?handler=ledger")
        assert "Retry" in page
        assert "Resume…" in page
        assert "No parked keys." in await text(client, "/keys?handler=receipt")
        assert "did you mean 'ledger'" in await text(client, "/keys?handler=ledgr", 400)


async def test_processes_and_locks_are_shown_during_and_after_running(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (outbox, client):
        assert "No process has reported within the last 10 minutes." in await text(client, "/instances")
        async with outbox.running():

            async def has_reported() -> bool:
                return bool((await facts(client, "/instances"))["instances"])

            await eventually(has_reported, timeout=60)
            found = await facts(client, "/instances")
        [instance] = found["instances"]
        assert instance["is_alive"]
        assert {lock["handler_name"] for lock in found["locks"]} >= {None, "ledger", "legacy-tracking"}


async def test_stuck_runs_are_shown_with_their_current_line(tmp_path: Path) -> None:
    async with Outbox(f"sqlite:///{tmp_path / 'new.db'}", namespace="shop") as outbox:
        await outbox.migrate()
        now = utc_now()
        stuck = {
            "handler": "mail",
            "event_id": None,
            "since": now.isoformat(),
            "seconds": 7.0,
            "at": "mail.py:7 in send",
        }
        content = {"roles": ["handling"], "handlers": {"mail": {"stuck": 1}}, "stuck": [stuck]}
        report = InstanceReport(
            instance="web-1:7:c0ffee", version="1", started_date=now, last_seen_date=now, delay_seconds=10,
            report=msgspec.Raw(msgspec.json.encode(content)),
        )  # fmt: skip
        await database_of(outbox).reports.write_report("shop", report)
        async with browser(Dashboard(outbox, authorize=lambda request: Access.viewer("ada"))) as client:
            page = await text(client, "/instances")
        assert "Stuck runs of web-1:7" in page
        assert "mail.py:7 in send" in page


async def test_shards_show_tables_fanout_and_retention(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (_, client):
        [shard] = (await facts(client, "/shards"))["shards"]
        assert (shard["shard"], shard["is_reachable"], shard["schema"]) == ("default", True, None)
        page = await text(client, "/shards")
        assert "7 days" in page
        assert "90 days" in page
        assert "Purge now…" in page


async def test_operations_show_actor_action_and_reason(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path) as (_, client):
        found = await facts(client, "/operations")
        said = [
            (row["operation"]["kind"], row["description"], row["operation"]["reason"]) for row in found["operations"]
        ]
        assert said == [
            ("retry", "3 notifications", "is the PDF service back?"),
            ("pause", "the handler “warehouse-export”", "the warehouse counts its stock"),
        ]
        id = found["operations"][0]["operation"]["id"]
        page = await text(client, f"/operations/{id}")
        for words in ("Retry by ada@example.org", "is the PDF service back?", "3 of 3", "in code", id):
            assert words in page, words
        assert "There is no operation nobody." in await text(client, "/operations/nobody", 404)
        await text(client, f"/operations/{'0' * 8}-0000-7000-8000-{'0' * 12}", 404)


async def test_a_viewer_sees_no_operations_and_no_error_messages(busy_file: Path, tmp_path: Path) -> None:
    async with shop(busy_file, tmp_path, Access.viewer("grace")) as (outbox, client):
        await outbox.admin.retry(Filter(error="refused the connection"), actor="ada")
        pages = ("/dead", "/notifications", "/handlers/ledger", "/handlers/invoice-pdf", "/keys", "/shards",
                 "/operations")  # fmt: skip
        for path in pages:
            page = await client.get(path)
            assert 'method="post"' not in page.text, path
            assert 'name="id"' not in page.text, path
            for secret in ("refused the connection", "no account of", "has no address"):
                assert secret not in page.text, (path, secret)
                assert secret not in (await client.get(path + "?format=json")).text, (path, secret)
        found = await facts(client, "/dead")
        assert "ValueError" in [group["error"] for group in found["grouped"]["groups"]]
        assert {row["error_type"] for row in found["rows"]} >= {"LookupError", "ValueError"}


async def test_empty_tables_have_a_friendly_text(tmp_path: Path) -> None:
    async with Outbox(f"sqlite:///{tmp_path / 'new.db'}", namespace="shop") as outbox:
        await outbox.migrate()
        async with browser(Dashboard(outbox, authorize=lambda request: Access.admin("ada"))) as client:
            words = {
                "/handlers": "No handlers yet.",
                "/dead": "No dead letters: every notification has been handled or is still being processed.",
                "/notifications": "No notifications yet.",
                "/keys": "No parked keys.",
                "/instances": "No process has reported",
                "/operations": "No operations yet.",
            }
            for path, expected in words.items():
                assert expected in await text(client, path), path


async def test_a_list_is_shown_without_slow_groups_and_counts(
    busy_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outboxio.dashboard.lists.PATIENCE", 0)
    async with shop(busy_file, tmp_path) as (_, client):
        found = await facts(client, "/dead")
        assert found["grouped"] is None
        assert found["count"] == {"number": len(found["rows"]), "is_complete": False}
        page = await text(client, "/dead")
        assert "Grouping the dead letters took longer than 2 s" in page
        assert f"Retry all {len(found['rows'])}+" in page
        assert "Grouping the failures took longer than 2 s" in await text(client, "/handlers/ledger")
        assert (await facts(client, "/notifications"))["count"] == {"number": 50, "is_complete": False}
