"""Screenshots of every page, with the data of the busy shop: ``OUTBOXIO_TEST_WRITE_SCREENSHOTS=docs/dashboard``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.addresses import NAMES, address
from tests.kit.looking import Looker
from tests.kit.site import Site

WRITE_TO = os.environ.get("OUTBOXIO_TEST_WRITE_SCREENSHOTS")
SIZES = {"": {"width": 1280, "height": 800}, "-phone": {"width": 390, "height": 800}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_page_has_a_screenshot(
    site: Site, look: Callable[..., Looker], tmp_path: Path, size: str, scheme: str
) -> None:
    looker = look(site, viewport=SIZES[size], color_scheme=scheme)
    folder = Path(WRITE_TO or tmp_path)
    for name in NAMES:
        looker.go(address(site, name)).screenshot(path=folder / f"{name}{size}-{scheme}.png", full_page=True)
        assert (folder / f"{name}{size}-{scheme}.png").stat().st_size > 5_000
