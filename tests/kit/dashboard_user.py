"""A user of the dashboard with a real browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from playwright.sync_api import ConsoleMessage, Page

from tests.kit.site import Site

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")


class DashboardUser:
    """A browser page and the warnings and errors of its console."""

    def __init__(self, site: Site, page: Page) -> None:
        self.site = site
        self.page = page
        self.problems: list[str] = []
        page.on("console", self._logged)
        page.on("pageerror", lambda error: self.problems.append(f"{page.url}: {error}"))

    def _logged(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{self.page.url}: {message.text}")

    def assert_no_problems(self) -> None:
        """Fail if a page logged to the console: a blocked script or style, a missing file, an error."""
        assert not self.problems, "\n".join(self.problems)

    def go(self, path: str = "") -> Page:
        """Open a page below the mount."""
        answer = self.page.goto(self.site.url + path)
        assert answer is not None
        assert answer.status == 200, f"{path}: {answer.status}\n{self.page.inner_text('body')}"
        return self.page

    def faults(self, rules: Sequence[str] = ()) -> list[str]:
        """Return the serious and critical findings of axe-core. ``rules``: only these; all by default."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE)
        options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
        found: dict[str, Any] = self.page.evaluate("options => axe.run(options)", options)
        return [
            f"{one['id']} ({one['impact']}): {json.dumps([node['html'] for node in one['nodes']][:3])}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]

    def is_too_wide(self) -> bool:
        """True if the page is wider than the screen."""
        return bool(self.page.evaluate("document.scrollingElement.scrollWidth > innerWidth"))
