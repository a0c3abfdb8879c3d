"""Values, charts and texts of the dashboard, and errors as shown without the permission ``payloads``."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import pytest
from markupsafe import Markup
from msgspec.structs import replace
from starlette.requests import Request

from outboxio import Event, EventEnvelope, Filter, Outbox, RetryPolicy
from outboxio.dashboard import Access, Dashboard, allow_all
from outboxio.dashboard.pages.overview import parted, without_messages
from outboxio.dashboard.showing import charts, shown
from outboxio.health.reasons import Reason, without_error
from outboxio.health.values import Finding, past
from outboxio.model.notification import State
from outboxio.model.operating.groups import HistoryPoint
from outboxio.model.operating.operation import OperationState
from outboxio.testing import memory_outbox
from tests.kit.dashboards import browser
from tests.kit.sources import ROOT

pytestmark = pytest.mark.usefixtures("patient_pages")

NOON = datetime(2026, 11, 25, 12)


class Paid(Event):
    card: str


async def filled(outbox: Outbox) -> None:
    """A handler has failed for twelve events, with errors that quote a card."""

    @outbox.handler(Paid, name="invoice: pdf", retry=RetryPolicy(max_attempts=1))
    async def invoice(envelope: EventEnvelope[Paid]) -> None:
        raise ConnectionError(f"no answer for card {envelope.event.card}")

    async with outbox.transaction("Pay") as tx:
        for number in range(12):
            tx.emit(Paid(f"4111-secret-{number}"), model_id=number, model_type="Order")
    await outbox.drain()


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rendered", "text"),
    [
        (shown.number(8211), "8,211"),
        (shown.number(0.44), "0.4"),
        (shown.number(340.4), "340"),
        (shown.number(0.0), "0"),
        (shown.number(None), shown.NOTHING),
        (shown.bounded(10_000), "10,000+"),
        (shown.bounded(9_999), "9,999"),
        (shown.bounded(100, 100), "100+"),
        (shown.duration(0.0254), "25 ms"),
        (shown.duration(0.44), "0.4 s"),
        (shown.duration(840), "14 min"),
        (shown.duration(None), shown.NOTHING),
        (shown.share(0.92), "92 %"),
        (shown.share(0.004), "< 1 %"),
        (shown.share(0.0), "0 %"),
        (shown.timestamp(NOON), "2026-11-25 12:00:00"),
        (shown.iso(NOON), "2026-11-25T12:00:00Z"),
        (shown.ago(NOON, NOON + timedelta(minutes=14)), "14 min ago"),
        (shown.ago(NOON + timedelta(hours=3), NOON), "in 3 h"),
        (shown.ago(NOON, NOON), "now"),
        (shown.ago(NOON, NOON + timedelta(seconds=4.4)), "4 s ago"),
        (past(0.0), "just now"),
        (past(4.4), "4 s ago"),
        (past(840.0), "14 min ago"),
        (shown.process("web-1:4711:a1b2c3d4"), "web-1:4711"),
        (shown.shortened("a\n  b" + "c" * 200, 10), "a bcccccc…"),
    ],
)
def test_values_are_shown_as_people_read_them(rendered: str, text: str) -> None:
    assert rendered == text


async def test_a_bounded_count_shows_whether_it_is_complete() -> None:
    async with memory_outbox() as outbox:
        await filled(outbox)
        assert shown.bounded(await outbox.admin.count(Filter(states=("DEAD",)))) == "12"
        assert shown.bounded(await outbox.admin.count(Filter(states=("DEAD",)), most=5)) == "5+"


def test_names_in_a_sentence_are_code_and_never_markup() -> None:
    rendered = shown.sentence("`a<b>` is behind: <i>, `")

    assert isinstance(rendered, Markup)
    assert rendered == "<code>a&lt;b&gt;</code> is behind: &lt;i&gt;, `"


# --- charts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0] * 60, [1, 2, 3], [7], [0, 10**12, 0]])
def test_a_sparkline_stays_within_its_box(values: list[float]) -> None:
    chart = ElementTree.fromstring(charts.spark(values, 120, 24))

    points = [tuple(map(float, pair.split(","))) for pair in chart[1].attrib["points"].split()]
    assert len(points) == len(values)
    assert all(0 <= x <= 120 and 0 <= y <= 24 for x, y in points)
    assert ("flat" in chart.attrib["class"]) == (not any(values))
    assert charts.spark([]) == ""


def point(minute: int, **numbers: int) -> HistoryPoint:
    values: dict[str, Any] = {**dict.fromkeys(HistoryPoint.__struct_fields__), "begin": NOON.replace(minute=minute)}
    return HistoryPoint(**{**values, "succeeded": 0, "failed": 0, "dead": 0, "expired": 0, "skipped": 0, **numbers})


def test_bars_are_stacked_with_the_counts_of_their_period() -> None:
    points = [point(5, succeeded=90, failed=10), point(6), point(7, succeeded=1, dead=60, expired=40)]
    chart = ElementTree.fromstring(charts.bars(points, 300, 118))

    assert " style=" not in charts.bars(points)
    groups = [node for node in chart if node.tag == "g"]
    assert [node.attrib["class"] for node in groups[0][1:]] == ["bar-hover", "bar-ok", "bar-failed"]
    assert groups[2][0].text == "12:07 1 succeeded, 0 failed, 100 failed permanently"
    for group in groups:
        heights = [float(node.attrib["height"]) for node in group[2:]]
        assert sum(heights) <= 100.01
    assert charts.bars([]) == ""


def test_lags_are_columns_up_to_the_largest_bound() -> None:
    points = [replace(point(5), lag_p50=0.01, lag_p95=0.25), point(6), replace(point(7), lag_p50=5.0, lag_p95=math.inf)]
    chart = ElementTree.fromstring(charts.lags(points, 300, 118))

    groups = [node for node in chart if node.tag == "g"]
    assert groups[0][0].text == "12:05 95 % started within 0.25 s, half within 10 ms"
    assert groups[1][0].text == "12:06 no run"
    assert [len(group) for group in groups] == [3, 2, 3]
    assert float(groups[2][2].attrib["height"]) == pytest.approx(100)
    assert charts.lags([]) == ""


def test_documentation_and_dashboard_have_the_same_colours() -> None:
    pages = (ROOT / "outboxio/dashboard/static/outboxio.css").read_text("utf-8")
    docs = (ROOT / "docs/stylesheets/extra.css").read_text("utf-8")
    light, _, dark = docs.partition('[data-md-color-scheme="slate"]')
    accents, grounds = (re.findall(rf"--{name}: (#\w+);", pages)[:2] for name in ("accent", "ground"))

    for part, accent in zip((light, dark), accents, strict=True):
        for name in ("primary-fg-color", "typeset-a-color", "accent-fg-color"):
            assert f"--md-{name}: {accent};" in part
    assert f"--md-default-bg-color: {grounds[1]};" in dark
    mark = (ROOT / "docs/images/mark.svg").read_text("utf-8")
    icon = (ROOT / "outboxio/dashboard/static/icon.svg").read_text("utf-8")
    assert re.findall("<path.*", mark) == re.findall("<path.*", icon)


@pytest.mark.parametrize(
    ("largest", "top"), [(0, 4), (4, 4), (5, 6), (11, 20), (21, 30), (61, 80), (401, 600), (99_999, 10**5)]
)
def test_the_top_of_a_scale_is_a_round_number(largest: int, top: int) -> None:
    assert charts.nice_top(largest) == top


# --- texts ----------------------------------------------------------------------------------------


def test_every_state_has_a_description_and_a_style() -> None:
    assert set(shown.STATES) == set(map(str, State))
    assert set(map(str, State)) | set(map(str, OperationState)) <= set(shown.MARKS)
    assert set(shown.MARKS.values()) == set(shown.SIGNS)
    assert set(shown.OPERATIONS) == set(map(str, OperationState))


async def test_every_term_on_the_pages_links_to_the_glossary() -> None:
    async with memory_outbox() as outbox, browser(Dashboard(outbox, authorize=allow_all)) as client:
        await filled(outbox)
        overview, glossary = (await client.get("/")).text, (await client.get("/glossary")).text

    anchors = {part.partition('"')[0] for part in overview.split("/glossary#")[1:]}
    assert len(anchors) > 8
    assert {anchor for anchor in anchors if f'id="{anchor}"' not in glossary} == set()


# --- what errors say ------------------------------------------------------------------------------


async def test_without_the_payloads_permission_only_error_types_are_shown() -> None:
    def viewer(request: Request) -> Access:
        return Access.viewer("ada")

    async with memory_outbox() as outbox:
        await filled(outbox)
        answers = {}
        for name, authorize in {"all": allow_all, "viewer": viewer}.items():
            async with browser(Dashboard(outbox, authorize=authorize)) as client:
                answers[name] = (await client.get("/")).text + (await client.get("/?format=json")).text

    assert "no answer for card" in answers["all"]
    assert "no answer for card" not in answers["viewer"]
    assert "secret" not in answers["viewer"]
    assert "ConnectionError" in answers["viewer"]


async def test_the_summary_of_a_failing_handler_ends_before_the_message() -> None:
    sentence = "`a: b` failed 92% of 12 runs in the last 5 minutes: ConnectionError: secret: more."
    failing = Finding(rule="handler_failing", level="degraded", text=sentence, fix="", handler="a: b", shard="x")
    async with memory_outbox() as outbox:
        overview = await outbox.admin.overview()
    rendered = without_messages(replace(overview, findings=(failing,)))

    assert rendered.verdict == ["`a: b` failed 92% of 12 runs in the last 5 minutes."]


async def test_the_summary_of_a_failing_job_ends_before_the_message() -> None:
    sentence = "Job `a: b` ended FAILED 14 min ago, after 3 attempts: ConnectionError: secret: more."
    failing = Finding(rule="job_failing", level="degraded", text=sentence, fix="", job="a: b", shard="x")
    async with memory_outbox() as outbox:
        overview = await outbox.admin.overview()
    rendered = without_messages(replace(overview, findings=(failing,)))

    assert rendered.verdict == ["Job `a: b` ended FAILED 14 min ago, after 3 attempts."]


async def test_healthy_handlers_are_folded_below_handlers_with_a_finding() -> None:
    async with memory_outbox() as outbox:
        await filled(outbox)
        [one] = (await outbox.admin.overview()).handlers
    well = replace(one, level="ok", dead_hour=0)
    bad, paused = replace(one, level="degraded"), replace(well, paused_since=NOON)

    assert parted([bad, paused, well, well, well, well]) == ([bad, paused], [well] * 4)
    assert parted([bad, well, well]) == ([bad, well, well], ())
    assert parted([well] * 9) == ([well] * 9, ())


# --- buttons --------------------------------------------------------------------------------------


async def test_a_button_is_shown_only_to_authorized_users() -> None:
    def on_call(request: Request) -> Access:
        return Access("ada", {"pause"})

    async with memory_outbox() as outbox:
        await filled(outbox)
        pages = {}
        for name, authorize in {"all": allow_all, "on call": on_call, "viewer": lambda _: Access.viewer("eve")}.items():
            async with browser(Dashboard(outbox, authorize=authorize)) as client:
                pages[name] = (await client.get("/")).text

        assert "/operations/pause" in pages["all"]
        assert "/operations/pause" in pages["on call"]
        assert 'class="operation"' in pages["all"]
        assert 'class="operation"' not in pages["viewer"]
        assert "/operations/pause" not in pages["viewer"]


async def test_a_notice_comes_from_the_operation_record_and_not_the_url() -> None:
    async with memory_outbox() as outbox:
        await filled(outbox)
        await outbox.admin.pause("invoice: pdf", actor="ada")
        [done] = await outbox.admin.operations()
        async with browser(Dashboard(outbox, authorize=allow_all)) as client:
            rendered = await client.get(f"/?did={done.id}")
            unknown = await client.get("/?did=Your+password+has+expired")

    assert 'class="did"' in rendered.text
    assert 'class="did"' not in unknown.text
    assert "password" not in unknown.text


def test_without_the_extra_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['jinja2'] = None; import outboxio; import outboxio.dashboard"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert "outboxio.dashboard needs jinja2: pip install 'outboxio[dashboard]'" in ended.stderr


def test_every_reason_has_a_text() -> None:
    assert shown.REASONS.keys() == {reason.value for reason in Reason}
    assert set(shown.NEEDS_HELP) < shown.REASONS.keys()


def test_without_the_payloads_permission_a_reason_hides_error_messages() -> None:
    assert without_error("The circuit breaker of `mail` is open: secret.") == "The circuit breaker of `mail` is open."
    behind = "Waits behind `1`, the first of key `k`. That one: The circuit breaker of `mail` is open: secret."
    assert without_error(behind) == behind.replace(": secret", "")
    assert without_error("Unknown: secret.") == "Unknown."
    assert without_error("Due since 12:00 UTC: it waits.") == "Due since 12:00 UTC: it waits."
