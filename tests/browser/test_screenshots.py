"""Screenshots of the pages, with the data of the busy shop.

``OUTBOXIO_TEST_WRITE_SCREENSHOTS=docs/operate/dashboard`` writes the screenshots of the documentation, and
``OUTBOXIO_TEST_WRITE_ALL_SCREENSHOTS=/tmp/pages`` writes every page, light, dark and on a phone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.browser.addresses import NAMES, address
from tests.kit.dashboard_user import DashboardUser
from tests.kit.site import Site

DOCS = os.environ.get("OUTBOXIO_TEST_WRITE_SCREENSHOTS")
ALL = os.environ.get("OUTBOXIO_TEST_WRITE_ALL_SCREENSHOTS")
SIZES = {"": {"width": 1280, "height": 800}, "-phone": {"width": 390, "height": 800}}
IN_DOCS = (
    ("overview", "", "light"), ("overview", "", "dark"), ("overview", "-phone", "light"), ("dead", "", "light"),
    ("handler", "", "light"), ("event", "", "light"),
)  # fmt: skip
EVERY = tuple(product(NAMES, SIZES, ("light", "dark")))
ONE_SCREEN = ("overview", "dead")
"""Long pages. Their screenshots in the documentation end with the screen."""


@pytest.mark.parametrize(("name", "size", "scheme"), EVERY if ALL else IN_DOCS)
def test_a_page_has_a_screenshot(
    site: Site, look: Callable[..., DashboardUser], tmp_path: Path, name: str, size: str, scheme: str
) -> None:
    page = look(site, viewport=SIZES[size], color_scheme=scheme).go(address(site, name))
    file = Path(ALL or DOCS or tmp_path) / f"{name}{size}-{scheme}.png"
    page.screenshot(path=file, full_page=bool(ALL) or name not in ONE_SCREEN)
    assert file.stat().st_size > 5_000
    assert ALL or file.stat().st_size < 200_000, "the documentation takes small pictures"
