"""The page refreshes itself in place, without changing the user's input."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.kit.dashboard_user import DashboardUser
from tests.kit.site import Site

Look = Callable[..., DashboardUser]
OFTEN = "localStorage.setItem('outboxio-every', '2')"
HIDDEN = "Object.defineProperty(document, 'hidden', {get: () => true})"


def requested_id(page: Page) -> list[str]:
    """The URLs that the script requests from now on."""
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url) if request.resource_type == "fetch" else None)
    return requested


def test_a_refresh_keeps_checkboxes_focus_details_and_typed_text(site: Site, look: Look) -> None:
    dashboard_user = look(site)
    dashboard_user.page.add_init_script(OFTEN)
    page = dashboard_user.go("dead")
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
    expect(page.locator("[data-state]")).to_contain_text("updated at", timeout=60_000)

    expect(box).to_be_checked()
    assert details.get_attribute("open") is not None
    expect(text).to_have_value("half a wo")
    expect(text).to_be_focused()


def test_a_refresh_shows_what_is_new(new_site: Callable[..., Site], look: Look) -> None:
    site = new_site()
    dashboard_user = look(site)
    dashboard_user.page.add_init_script(OFTEN)
    page = dashboard_user.go("operations")
    expect(page.get_by_text("the stock is counted")).to_have_count(0)

    site.run(lambda outbox: outbox.admin.unpause("warehouse-export", actor="grace", reason="the stock is counted"))

    expect(page.get_by_text("the stock is counted").first).to_be_visible(timeout=60_000)


def test_a_hidden_or_paused_page_sends_no_requests(site: Site, look: Look) -> None:
    dashboard_user, hidden = look(site), look(site)
    for one in (dashboard_user, hidden):
        one.page.add_init_script(OFTEN)
    hidden.page.add_init_script(HIDDEN)
    page = dashboard_user.go("")
    page.get_by_label("paused").check()
    requested, requested_hidden = requested_id(page), requested_id(hidden.page)
    hidden.go("")
    watched = look(site)
    watched.page.add_init_script(OFTEN)
    watched.go("")
    for _ in range(2):  # two refreshes of another page
        with watched.page.expect_response(lambda answer: answer.request.resource_type == "fetch", timeout=60_000):
            pass

    assert (requested, requested_hidden) == ([], [])
