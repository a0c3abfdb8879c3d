"""The documentation site builds with working links, without other servers, and with plain text beside each page."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.kit.dashboard_user import AXE
from tests.kit.sources import ROOT
from website.build import add_version, build
from website.docstrings import as_markdown
from website.links import problems
from website.navigation import navigation


@pytest.fixture(scope="module")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def address(documentation: Path) -> Iterator[str]:
    """The address of a static file server with the site."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(documentation))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_the_site_has_no_broken_links_and_no_other_servers(
    documentation: Path,
) -> None:
    assert problems(documentation) == []


def test_every_documentation_page_exists_as_html_and_markdown(documentation: Path) -> None:
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}

    assert {page for page in pages if not (documentation / page).exists()} == set()
    assert {page for page in pages if not (documentation / page.with_suffix(".html")).exists()} == set()


def test_every_page_except_decision_records_is_listed_for_language_models(documentation: Path) -> None:
    listed = re.findall(r"^- \[.+?\]\(([^)]+)\)", (documentation / "llms.txt").read_text("utf-8"), re.MULTILINE)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}

    assert sorted(listed) == sorted(page for page in pages if not page.startswith("decisions/"))
    everything = (documentation / "llms-full.txt").read_text("utf-8")
    assert [page for page in listed if f"<!-- {page} -->" not in everything] == []
    assert "\n:::" not in everything, "the docstrings are in the text"


def test_the_markup_of_docstrings_becomes_markdown() -> None:
    text = "See :meth:`~outboxio.Outbox.drain`.\n\nExample::\n\n    a = 1\n\n    b = 2\n\nNote::\n\n    c"

    assert as_markdown(text) == "See `Outbox.drain`.\n\n```python\na = 1\n\nb = 2\n```\n\nNote:\n\n```python\nc\n```"


def test_a_version_is_published_beside_older_versions(tmp_path: Path) -> None:
    site, versions = tmp_path / "site", tmp_path / "sites"
    site.mkdir()
    for version in ("1.0", "1.1"):
        (site / "index.html").write_text(version)
        add_version(site, versions, version)

    assert {folder.name: (folder / "index.html").read_text() for folder in versions.iterdir()} == {
        "1.0": "1.0", "1.1": "1.1", "latest": "1.1",
    }  # fmt: skip


def test_broken_links_missing_anchors_and_external_scripts_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html">b</a><a href="#c">c</a><script src="https://x.org/d.js"></script>'
    )

    assert problems(tmp_path) == [
        "a.html: loads https://x.org/d.js", "a.html: b.html", "a.html: #c (no such anchor)"
    ]  # fmt: skip


def test_the_search_works_without_another_server(chromium: Browser, address: str) -> None:
    requested: list[str] = []
    with chromium.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        page.on("request", lambda request: requested.append(request.url))
        page.goto(address)
        page.keyboard.press("/")
        page.get_by_role("combobox", name="Search").fill("dead letters")
        expect(page.get_by_text("New dead letters").first).to_be_visible(timeout=30_000)

    foreign = [url for url in requested if not url.startswith((address, "data:", "blob:"))]
    assert foreign == []


@pytest.mark.parametrize("page", ["index", "tutorial/1-first-event", "operate/runbook/new_dead", "reference/settings"])
def test_a_page_is_readable_on_a_phone(chromium: Browser, address: str, page: str) -> None:
    """The page is opened once, because that costs more than the checks. Only colours depend on the scheme."""
    with chromium.new_context(viewport={"width": 390, "height": 800}, color_scheme="light") as context:
        phone = context.new_page()
        phone.goto(f"{address}{page}.html")
        assert not phone.evaluate("document.scrollingElement.scrollWidth > innerWidth"), "the page is too wide"
        phone.evaluate(AXE)
        expect(phone.locator("body")).to_have_attribute("data-md-color-scheme", "default")
        assert violations(phone, "color-contrast", "image-alt", "link-name", "heading-order") == []
        phone.get_by_title("Dark", exact=True).click()
        expect(phone.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
        assert violations(phone, "color-contrast") == []


def violations(page: Page, *rules: str) -> list[tuple[str, str]]:
    """The violated rules of the article, each with the HTML of the first place."""
    found = page.evaluate("rules => axe.run('article', {runOnly: rules})", rules)
    return [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]]


def test_every_page_is_linked_from_the_index_of_its_folder() -> None:
    assert "{'More': " not in str(navigation(ROOT / "docs")), "add the page to the index.md of its folder"


def test_copy_page_copies_the_markdown_of_the_page(chromium: Browser, documentation: Path, address: str) -> None:
    with chromium.new_context() as context:
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.goto(f"{address}how-to/index.html")
        page.get_by_role("button", name="Copy page").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()

        copied = page.evaluate("navigator.clipboard.readText()")

    assert copied == (documentation / "how-to" / "index.md").read_text("utf-8")
