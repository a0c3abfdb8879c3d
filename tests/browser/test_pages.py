"""Every page in a real browser: no complaint of the browser, no barrier, no page that is wider than the screen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.addresses import NAMES, address
from tests.kit.looking import Looker
from tests.kit.site import Site

Look = Callable[..., Looker]


#: The rules that colours can break. Everything else is the same in the dark.
OF_COLOURS = ("color-contrast", "link-in-text-block")


@pytest.mark.parametrize(("scheme", "rules"), [("light", ()), ("dark", OF_COLOURS)])
def test_no_page_has_a_serious_barrier_and_no_page_breaks_the_policy(
    site: Site, look: Look, scheme: str, rules: tuple[str, ...]
) -> None:
    looker = look(site, color_scheme=scheme)
    faults = {}
    for name in NAMES:
        looker.go(address(site, name))
        if found := looker.faults(rules):
            faults[name] = found
    assert not faults, faults


def test_no_page_is_wider_than_a_phone(site: Site, look: Look) -> None:
    looker = look(site, viewport={"width": 390, "height": 800})
    wide = []
    for name in NAMES:
        looker.go(address(site, name))
        if looker.is_too_wide():
            wide.append(name)
    assert not wide


def test_every_link_of_every_page_leads_somewhere(site: Site, look: Look) -> None:
    looker = look(site)
    seen, broken = set(), []
    for name in NAMES:
        page = looker.go(address(site, name))
        for link in page.eval_on_selector_all("a[href]", "links => links.map(link => link.href.split('#')[0])"):
            if link.startswith(site.url) and link not in seen and len(seen) < 150:
                seen.add(link)
                answer = page.request.get(link)
                if answer.status != 200:
                    broken.append(f"{name}: {link} {answer.status}")
    assert not broken
