"""Every page in a real browser: no console message, no accessibility barrier, no page wider than the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.addresses import NAMES, address
from tests.kit.dashboard_user import DashboardUser
from tests.kit.site import Site

DESK, WIDE_DESK, PHONE = (1280, 800), (1400, 900), (390, 800)

#: The rules that depend on colours. Everything else is the same in the dark scheme.
OF_COLOURS = ("color-contrast", "link-in-text-block")

#: The left edge of each cell of the first row, and of its header. Tables that fold on narrow screens have no headers.
EDGES = """tables => tables.flatMap(table => {
    const row = table.tBodies[0]?.rows[0], head = table.tHead?.rows[0];
    if (!row || !head || row.cells.length !== head.cells.length || !row.offsetParent) return [];
    const left = cell => cell.getBoundingClientRect().left;
    return [...row.cells].map((cell, at) => [left(cell) - left(head.cells[at]), head.cells[at].innerText]);
})"""


#: The regions that scroll sideways.
CUT = """regions => regions.filter(one => one.scrollWidth > one.clientWidth).map(
    one => `${innerWidth}: ${one.getAttribute("aria-label")} ${one.scrollWidth} > ${one.clientWidth}`)"""


@dataclass(frozen=True)
class Seen:
    """What a visit to a page found."""

    barriers: dict[str, list[str]]
    """By colour scheme."""
    is_too_wide: bool
    """On a phone."""
    cut: list[str]
    """The tables that are wider than their container on a desktop."""
    astray: list[str]
    """The headers whose cells are not below them."""
    links: list[str]
    problems: list[str]
    """What the browser's console reported."""


@pytest.fixture(scope="module")
def dashboard_user(chromium: Browser, site: Site) -> Iterator[DashboardUser]:
    with chromium.new_context(base_url=site.url) as context:
        yield DashboardUser(site, context.new_page())


@pytest.fixture(scope="module", params=NAMES)
def seen(request: pytest.FixtureRequest, dashboard_user: DashboardUser) -> Seen:
    """A page that is opened once for all tests of it: opening a page costs more than checking it."""
    return visit(dashboard_user, request.param)


@pytest.fixture(scope="module")
def requested() -> set[str]:
    """The links of all pages that were followed."""
    return set()


def visit(dashboard_user: DashboardUser, name: str) -> Seen:
    resize(dashboard_user, DESK)
    dashboard_user.problems.clear()
    page = dashboard_user.go(address(dashboard_user.site, name))
    astray = [head for off, head in page.eval_on_selector_all("main table", EDGES) if abs(off) > 1]
    links = page.eval_on_selector_all("a[href]", "links => links.map(link => link.href.split('#')[0])")
    page.emulate_media(color_scheme="light")
    barriers = {"light": dashboard_user.faults()}
    page.emulate_media(color_scheme="dark")
    barriers["dark"] = dashboard_user.faults(OF_COLOURS)
    cut: list[str] = page.eval_on_selector_all(".scroll", CUT)
    resize(dashboard_user, WIDE_DESK)
    cut += page.eval_on_selector_all(".scroll", CUT)
    resize(dashboard_user, PHONE)
    barriers["phone"] = dashboard_user.faults()
    return Seen(barriers, dashboard_user.is_too_wide(), cut, astray, links, dashboard_user.problems[:])


def resize(dashboard_user: DashboardUser, size: tuple[int, int]) -> None:
    dashboard_user.page.set_viewport_size({"width": size[0], "height": size[1]})


def test_a_page_has_no_accessibility_or_policy_violations(seen: Seen) -> None:
    assert seen.barriers == {"light": [], "dark": [], "phone": []}
    assert seen.problems == []


def test_a_page_is_not_wider_than_a_phone(seen: Seen) -> None:
    assert not seen.is_too_wide


def test_no_table_of_a_page_is_cut_off_on_a_desktop(seen: Seen) -> None:
    assert seen.cut == []


@pytest.mark.parametrize("name", ["overview", "handler"])
def test_a_chart_on_a_phone_shows_its_newest_values(dashboard_user: DashboardUser, name: str) -> None:
    resize(dashboard_user, PHONE)
    page = dashboard_user.go(address(dashboard_user.site, name))
    chart = page.get_by_role("region", name="Chart of runs")
    hidden = chart.evaluate("one => one.getBoundingClientRect().right - one.firstChild.getBoundingClientRect().right")
    wider = chart.evaluate("one => one.scrollWidth - one.clientWidth")

    assert wider > 0
    assert hidden >= 0, f"the newest {-hidden} px are out of sight"


def test_an_id_is_copied_with_the_keyboard(dashboard_user: DashboardUser) -> None:
    resize(dashboard_user, DESK)
    dashboard_user.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = dashboard_user.go("dead")
    button = page.get_by_role("button", name="Copy the event id").first
    button.focus()
    page.keyboard.press("Enter")

    whole = button.get_attribute("data-copy")
    expect(page.locator("[data-announcer]")).to_have_text(f"copied {whole}")
    assert page.evaluate("navigator.clipboard.readText()") == whole
    expect(button).to_be_focused()


def test_the_slash_key_opens_the_search_and_an_id_its_event(dashboard_user: DashboardUser) -> None:
    resize(dashboard_user, DESK)
    [dead] = dashboard_user.site.run(lambda outbox: outbox.admin.list(state="DEAD", handler="invoice-pdf", limit=1))
    page = dashboard_user.go("shards")
    page.keyboard.press("/")
    page.keyboard.type(str(dead.id))
    page.keyboard.press("Enter")

    expect(page).to_have_url(re.compile(f"/events/{dead.id}$"))
    expect(page.get_by_role("searchbox")).to_have_value("")


def test_every_cell_is_below_its_header(seen: Seen) -> None:
    assert seen.astray == []


def test_every_link_of_a_page_works(seen: Seen, dashboard_user: DashboardUser, requested: set[str]) -> None:
    links = {link for link in seen.links if link.startswith(dashboard_user.site.url)} - requested
    requested |= links
    answers = {link: dashboard_user.page.request.get(link).status for link in links}
    assert {link: status for link, status in answers.items() if status != 200} == {}
