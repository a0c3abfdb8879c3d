"""Every page in a real browser: no complaint of the browser, no barrier, no page that is wider than the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.addresses import NAMES, address
from tests.kit.looking import Looker
from tests.kit.site import Site

DESK, WIDE_DESK, PHONE = (1280, 800), (1400, 900), (390, 800)

#: The rules that colours can break. Everything else is the same in the dark.
OF_COLOURS = ("color-contrast", "link-in-text-block")

#: The left edge of each cell of the first row, and of its head. Tables that fold on narrow screens have no heads there.
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
    """What a visit of a page has found."""

    barriers: dict[str, list[str]]
    """By colour scheme."""
    is_too_wide: bool
    """On a phone."""
    cut: list[str]
    """The tables that are wider than their place, on a desk."""
    astray: list[str]
    """The heads of columns whose cells do not stand below them."""
    links: list[str]


@pytest.fixture(scope="module")
def looker(chromium: Browser, site: Site) -> Iterator[Looker]:
    with chromium.new_context(base_url=site.url) as context:
        yield Looker(site, context.new_page())


@pytest.fixture(scope="module")
def seen(looker: Looker) -> dict[str, Seen]:
    """Each page is opened once: to open a page costs more than to look at it."""
    return {name: visit(looker, name) for name in NAMES}


def visit(looker: Looker, name: str) -> Seen:
    resize(looker, DESK)
    page = looker.go(address(looker.site, name))
    astray = [head for off, head in page.eval_on_selector_all("main table", EDGES) if abs(off) > 1]
    links = page.eval_on_selector_all("a[href]", "links => links.map(link => link.href.split('#')[0])")
    page.emulate_media(color_scheme="light")
    barriers = {"light": looker.faults()}
    page.emulate_media(color_scheme="dark")
    barriers["dark"] = looker.faults(OF_COLOURS)
    cut: list[str] = page.eval_on_selector_all(".scroll", CUT)
    resize(looker, WIDE_DESK)
    cut += page.eval_on_selector_all(".scroll", CUT)
    resize(looker, PHONE)
    barriers["phone"] = looker.faults()
    return Seen(barriers, looker.is_too_wide(), cut, astray, links)


def resize(looker: Looker, size: tuple[int, int]) -> None:
    looker.page.set_viewport_size({"width": size[0], "height": size[1]})


@pytest.mark.parametrize("scheme", ["light", "dark", "phone"])
def test_no_page_has_a_serious_barrier_and_no_page_breaks_the_policy(
    seen: dict[str, Seen], looker: Looker, scheme: str
) -> None:
    faults = {name: page.barriers[scheme] for name, page in seen.items() if page.barriers[scheme]}
    assert not faults, faults
    looker.refuse_complaints()


def test_no_page_is_wider_than_a_phone(seen: dict[str, Seen]) -> None:
    assert [name for name, page in seen.items() if page.is_too_wide] == []


def test_no_table_is_cut_off_on_a_desk(seen: dict[str, Seen]) -> None:
    assert {name: page.cut for name, page in seen.items() if page.cut} == {}


@pytest.mark.parametrize("name", ["overview", "handler"])
def test_a_chart_on_a_phone_shows_its_newest_end(looker: Looker, name: str) -> None:
    resize(looker, PHONE)
    page = looker.go(address(looker.site, name))
    chart = page.get_by_role("region", name="Chart of runs")
    hidden = chart.evaluate("one => one.getBoundingClientRect().right - one.firstChild.getBoundingClientRect().right")
    wider = chart.evaluate("one => one.scrollWidth - one.clientWidth")

    assert wider > 0
    assert hidden >= 0, f"the newest {-hidden} px are out of sight"


def test_an_id_is_copied_with_the_keyboard(looker: Looker) -> None:
    resize(looker, DESK)
    looker.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = looker.go("dead")
    button = page.get_by_role("button", name="Copy the event id").first
    button.focus()
    page.keyboard.press("Enter")

    whole = button.get_attribute("data-copy")
    expect(page.locator("[data-told]")).to_have_text(f"copied {whole}")
    assert page.evaluate("navigator.clipboard.readText()") == whole
    expect(button).to_be_focused()


def test_the_slash_leads_to_the_search_and_an_id_to_its_event(looker: Looker) -> None:
    resize(looker, DESK)
    [dead] = looker.site.run(lambda outbox: outbox.admin.list(state="DEAD", handler="invoice-pdf", limit=1))
    page = looker.go("shards")
    page.keyboard.press("/")
    page.keyboard.type(str(dead.id))
    page.keyboard.press("Enter")

    expect(page).to_have_url(re.compile(f"/events/{dead.id}$"))
    expect(page.get_by_role("searchbox")).to_have_value("")


def test_every_cell_stands_below_its_head(seen: dict[str, Seen]) -> None:
    assert [(name, head) for name, page in seen.items() for head in page.astray] == []


def test_every_link_of_every_page_leads_somewhere(seen: dict[str, Seen], looker: Looker) -> None:
    asked, broken = set(), []
    for name, page in seen.items():
        for link in page.links:
            if link.startswith(looker.site.url) and link not in asked and len(asked) < 150:
                asked.add(link)
                answer = looker.page.request.get(link)
                if answer.status != 200:
                    broken.append(f"{name}: {link} {answer.status}")
    assert not broken
