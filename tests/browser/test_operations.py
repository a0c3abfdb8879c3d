"""Operations in a real browser: without JavaScript, by keyboard only, in bulk, and from another site."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from playwright.sync_api import Page, expect

from outboxio import Action, Filter, Outbox, Transaction
from tests.kit.app import eventually
from tests.kit.busy import PaymentTaken
from tests.kit.dashboard_user import DashboardUser
from tests.kit.site import MOUNT, Site

Look = Callable[..., DashboardUser]
NewSite = Callable[..., Site]
MANY = 5_000
LATER = 60_000  # milliseconds
FAILED_PDF = Filter(states=("DEAD",), handler="invoice-pdf")


class TakePayments(Action):
    """Takes payments whose invoices fail."""

    number: int

    async def perform(self, tx: Transaction) -> None:
        for order in range(0, 3 * self.number, 3):
            tx.emit(PaymentTaken(order, "customer-000", "1.00"), model_id=order, model_type="Order")


async def dead(outbox: Outbox) -> int:
    return int(await outbox.admin.count(FAILED_PDF))


async def fail_many(outbox: Outbox) -> None:
    """Have many notifications of ``invoice-pdf`` end DEAD."""
    before = await dead(outbox)
    await outbox.execute(TakePayments(MANY - before))

    async def have_ended() -> bool:
        return await dead(outbox) >= MANY

    await eventually(have_ended, timeout=120)


def test_without_javascript_all_matches_are_retried_with_progress(new_site: NewSite, look: Look) -> None:
    site = new_site()
    site.run(fail_many)
    dashboard_user = look(site, java_script_enabled=False)
    page = dashboard_user.go("dead?handler=invoice-pdf")

    page.get_by_role("button", name=re.compile(r"^Retry all 5,000")).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("5,000")
    page.get_by_label("Reason").fill("the PDF service is back")
    page.get_by_role("button", name=re.compile("5,000")).click()

    expect(page).to_have_url(re.compile(r"/operations/"))
    operation_page = page.url.removeprefix(site.url)
    dashboard_user.go(operation_page)
    expect(page.get_by_role("progressbar")).to_be_visible()
    for _ in range(300):
        if page.locator(".state", has_text="DONE").count():
            break
        page.wait_for_timeout(200)
        dashboard_user.go(operation_page)
    expect(page.locator("main")).to_contain_text("5,000 changed")
    [operation] = site.run(lambda outbox: outbox.admin.operations(limit=1))
    assert (operation.actor, operation.origin, operation.done) == ("ada@example.org", "dashboard", MANY)
    assert operation.reason == "the PDF service is back"


def test_the_progress_of_an_operation_updates_without_reloading(new_site: NewSite, look: Look) -> None:
    site = new_site()
    site.run(fail_many)
    dashboard_user = look(site)
    dashboard_user.page.add_init_script("localStorage.setItem('outboxio-every', '2')")
    operation = site.run(lambda outbox: outbox.admin.retry(FAILED_PDF, background=True))
    page = dashboard_user.go(f"operations/{operation.id}")

    expect(page.locator("main")).to_contain_text("5,000 changed", timeout=LATER)
    expect(page.locator(".state", has_text="DONE")).to_be_visible(timeout=LATER)


def test_the_button_shows_how_many_rows_are_checked(site: Site, look: Look) -> None:
    page = look(site).go("dead")
    button = page.get_by_role("button", name=re.compile(r"Retry (\d+ )?selected"))
    expect(button).to_be_disabled()
    expect(button).to_have_text("Retry selected")

    page.locator("input[data-one]").nth(0).check()
    page.locator("input[data-one]").nth(2).check()

    expect(button).to_have_text("Retry 2 selected")
    page.locator("input[data-all]").check()
    number = page.locator("input[data-one]").count()
    expect(button).to_have_text(f"Retry {number} selected")


def test_a_handler_is_paused_with_the_keyboard_alone(new_site: NewSite, look: Look) -> None:
    site = new_site()
    page = look(site).go("handlers/receipt")
    press_until(page, "Pause")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("receipt")
    press_until(page, "Reason")
    page.keyboard.type("the printer is out of paper")
    page.keyboard.press("Enter")

    expect(page.get_by_role("button", name=re.compile("Unpause"))).to_be_visible()
    [operation] = site.run(lambda outbox: outbox.admin.operations(limit=1))
    assert (operation.kind, operation.reason) == ("pause", "the printer is out of paper")


def test_a_job_is_paused_without_javascript_and_unpaused_with_it(new_site: NewSite, look: Look) -> None:
    site = new_site()
    page = look(site, java_script_enabled=False).go("jobs")
    row = page.get_by_role("row").filter(has_text="close-day")
    row.get_by_role("button", name=re.compile("^Pause")).click()
    page.get_by_label("Reason").fill("the ledger is locked")
    page.get_by_role("button", name="Pause close-day").click()
    expect(row).to_contain_text("PAUSED")

    page = look(site).go("jobs")
    row = page.get_by_role("row").filter(has_text="close-day")
    row.get_by_role("button", name="Unpause").click()
    expect(row.get_by_role("button", name=re.compile("^Pause"))).to_be_visible()
    operations = site.run(lambda outbox: outbox.admin.operations(limit=2))
    assert [(operation.kind, operation.reason) for operation in operations] == [
        ("unpause_job", None), ("pause_job", "the ledger is locked"),
    ]  # fmt: skip


def press_until(page: Page, name: str) -> None:
    """Press the tab key until the element with this name has a visible focus."""
    label = "(e => e.innerText || e.labels?.[0]?.innerText || '')(document.activeElement)"
    for _ in range(60):
        page.keyboard.press("Tab")
        if str(page.evaluate(label)).strip().startswith(name):
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"{name} has the focus, but no visible outline"
            return
    raise AssertionError(f"the tab key does not reach {name!r}")


def test_a_form_of_another_site_is_refused(new_site: NewSite, look: Look) -> None:
    site = new_site()
    dashboard_user = look(site)
    dashboard_user.go("handlers/receipt")  # the browser has the cookie of the page now
    form = f"""<form method="post" action="{site.origin}{MOUNT}/operations/pause">
      <input name="handler" value="receipt"><input name="sure" value="yes"></form>
      <script>document.forms[0].submit()</script>"""
    with elsewhere(form) as url:
        with dashboard_user.page.expect_navigation(url=re.compile("/operations/pause"), timeout=LATER) as navigation:
            dashboard_user.page.goto(url)
        answer = navigation.value

    assert answer.status == 403
    expect(dashboard_user.page.locator("body")).to_contain_text("another site")
    assert not [
        one for one in site.run(lambda outbox: outbox.admin.operations()) if one.request.get("handler") == "receipt"
    ]
    dashboard_user.problems.clear()  # the browser logs the 403


@contextmanager
def elsewhere(body: str) -> Iterator[str]:
    """A page on another site: ``localhost`` is not ``127.0.0.1``."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_address[1]}/"
        server.shutdown()
