"""Files, classes and functions stay small enough to be read; a table lists the exceptions.

A size in the table can only go down. The table is printed by ``python -m tests.kit.house``.
"""

from __future__ import annotations

from collections import Counter

from tests.kit.house import LIMITS, above
from tests.kit.sources import ROOT, modules

MOST_FILES = 20  # of a folder of the package, without __init__.py

ABOVE: dict[tuple[str, str], int] = {}


def test_nothing_exceeds_its_limit_or_its_former_size() -> None:
    assert {where: size for where, size in above().items() if size > ABOVE.get(where, LIMITS[where[0]])} == {}


def test_the_table_lists_nothing_that_is_below_its_limit() -> None:
    assert set(ABOVE) - set(above()) == set()


def test_no_top_level_folder_has_too_many_files() -> None:
    folders = Counter(
        path.parent.relative_to(ROOT)
        for path in modules()
        if path.name != "__init__.py" and len(path.relative_to(ROOT).parts) <= 3
    )
    assert {str(folder): number for folder, number in folders.items() if number > MOST_FILES} == {}
