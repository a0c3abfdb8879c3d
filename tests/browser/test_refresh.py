"""The page refreshes itself in place, and leaves alone what the person before the page has done."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.kit.looking import Looker
from tests.kit.site import Site

Look = Callable[..., Looker]
OFTEN = "localStorage.setItem('outboxio-every', '2')"
HIDDEN = "Object.defineProperty(document, 'hidden', {get: () => true})"


def asked_for(page: Page) -> list[str]:
    """The addresses that the script asks for, from now on."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.resource_type == "fetch" else None)
    return asked


def test_a_refresh_keeps_ticked_boxes_focus_open_details_and_typed_text(site: Site, look: Look) -> None:
    looker = look(site)
    looker.page.add_init_script(OFTEN)
    page = looker.go("dead")
    chosen = page.locator("input[data-one]").nth(1).get_attribute("value")
    box = page.locator(f"input[data-one][value='{chosen}']")
    box.check()
    details = page.locator("main details").first
    details.locator("summary").click()
    text = page.locator("main input[type=text]").first
    text.fill("half a wo")
    text.focus()

    with page.expect_response(lambda answer: answer.request.resource_type == "fetch", timeout=60_000):
        pass
    expect(page.locator("[data-state]")).to_contain_text("read at", timeout=60_000)

    expect(box).to_be_checked()
    assert details.get_attribute("open") is not None
    expect(text).to_have_value("half a wo")
    expect(text).to_be_focused()


def test_a_refresh_shows_what_is_new(new_site: Callable[..., Site], look: Look) -> None:
    site = new_site()
    looker = look(site)
    looker.page.add_init_script(OFTEN)
    page = looker.go("operations")
    expect(page.get_by_text("the stock is counted")).to_have_count(0)

    site.run(lambda outbox: outbox.admin.unpause("warehouse-export", actor="grace", reason="the stock is counted"))

    expect(page.get_by_text("the stock is counted").first).to_be_visible(timeout=60_000)


def test_a_hidden_or_paused_page_asks_nothing(site: Site, look: Look) -> None:
    looker, hidden = look(site), look(site)
    for one in (looker, hidden):
        one.page.add_init_script(OFTEN)
    hidden.page.add_init_script(HIDDEN)
    page = looker.go("")
    page.get_by_label("paused").check()
    asked, asked_unseen = asked_for(page), asked_for(hidden.page)
    hidden.go("")
    watched = look(site)
    watched.page.add_init_script(OFTEN)
    watched.go("")
    for _ in range(2):  # two turns of a page that refreshes
        with watched.page.expect_response(lambda answer: answer.request.resource_type == "fetch", timeout=60_000):
            pass

    assert (asked, asked_unseen) == ([], [])
