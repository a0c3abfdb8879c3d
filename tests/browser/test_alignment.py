"""The cells of a column stand below the head of the column."""

from __future__ import annotations

from collections.abc import Callable

from tests.browser.addresses import NAMES, address
from tests.kit.looking import Looker
from tests.kit.site import Site

# The left edge of each cell of the first row, and of its head. Tables that fold on narrow screens have no heads there.
EDGES = """tables => tables.flatMap(table => {
    const row = table.tBodies[0]?.rows[0], head = table.tHead?.rows[0];
    if (!row || !head || row.cells.length !== head.cells.length || !row.offsetParent) return [];
    const left = cell => cell.getBoundingClientRect().left;
    return [...row.cells].map((cell, at) => [left(cell) - left(head.cells[at]), head.cells[at].innerText]);
})"""


def test_every_cell_stands_below_its_head(site: Site, look: Callable[..., Looker]) -> None:
    looker, astray = look(site), []
    for name in NAMES:
        page = looker.go(address(site, name))
        astray += [(name, head) for off, head in page.eval_on_selector_all("main table", EDGES) if abs(off) > 1]
    assert not astray
