"""Headless Chromium, and a site with the dashboard of a busy shop."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from outboxio import Action, Transaction
from outboxio.dashboard import Access
from tests.kit.busy import PaymentTaken, fill, open_shop
from tests.kit.dashboard_user import DashboardUser
from tests.kit.programs import programs
from tests.kit.site import Site, served

OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def administrator(request: object) -> Access:
    return Access.admin("ada@example.org")


@pytest.fixture(scope="session")
def busy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a busy shop, to be copied."""
    file = tmp_path_factory.mktemp("busy") / "shop.sqlite"
    asyncio.run(_fill(f"sqlite:///{file}"))
    return file


class PayByCard(Action):
    """Takes payments whose ids are UUIDs, and whose invoices fail."""

    async def perform(self, tx: Transaction) -> None:
        for order in range(3000, 3012, 3):
            taken = PaymentTaken(order, str(uuid4()), "1.00")
            tx.emit(taken, model_id=str(uuid4()), model_type="CardPayment", ordering_key=str(uuid4()))


async def _fill(url: str) -> None:
    await fill(url)
    async with open_shop(url) as outbox:
        await outbox.execute(PayByCard())
        await outbox.drain(timeout=60)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser. It ends with the module: its event loop would interfere with tests of coroutines."""
    program = programs.need("chromium")
    expect.set_options(timeout=60_000)  # milliseconds; 5 s by default, which a busy machine may need for a page
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(busy_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site that the tests of a module share. A test that changes rows makes a ``new_site``."""
    with served(_copy(busy_file, tmp_path_factory), authorize=administrator) as made:
        yield made


@pytest.fixture
def new_site(busy_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Site]]:
    """Creates a separate site, with options of ``Dashboard``."""
    with ExitStack() as stack:

        def make(**options: Any) -> Site:
            options = {"authorize": administrator} | options
            return stack.enter_context(served(_copy(busy_file, tmp_path_factory), **options))

        yield make


@pytest.fixture
def look(chromium: Browser) -> Iterator[Callable[..., DashboardUser]]:
    """Opens pages; fails at the end of the test if a page logged to the console."""
    with ExitStack() as stack:

        def opened(site: Site, **options: Any) -> DashboardUser:
            options = {"viewport": {"width": 1280, "height": 800}} | options
            context = chromium.new_context(base_url=site.url, **options)
            stack.callback(context.close)
            dashboard_user = DashboardUser(site, context.new_page())
            stack.callback(dashboard_user.assert_no_problems)
            return dashboard_user

        yield opened


def _copy(file: Path, factory: pytest.TempPathFactory) -> str:
    made = factory.mktemp("site") / "shop.sqlite"
    shutil.copy(file, made)
    return f"sqlite:///{made}"
