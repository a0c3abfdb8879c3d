"""``make test`` runs the tests in parts; together they select every test, and no result is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.__main__ import PARTS, ROOT, WITHOUT_DATABASES, Part, Result, quick
from tests.kit.servers import DIALECTS

SUMMARY = "....\n\n===== databases, brokers and programs =====\nsqlite: SQLite 3\nepmd: NOT TESTED, missing\n"


def test_the_counts_of_a_part_match_pytest() -> None:
    result = Result(1, f"{SUMMARY}1 failed, 30 passed, 2 skipped, 7 deselected, 3 errors in 61.20s (0:01:01)\n")

    assert result.counts == Counter(failed=1, passed=30, skipped=2, error=3)
    assert result.found == {"sqlite: SQLite 3", "epmd: NOT TESTED, missing"}
    assert not result.has_passed


def test_a_part_without_a_summary_is_an_error() -> None:
    assert Result(-9, "....").counts == Counter(error=1)
    assert Result(3, "1 passed in 2.00s\n").counts == Counter(passed=1, error=1)


def test_failed_tests_are_named_at_the_end() -> None:
    logged = "FAILED in a log\n==== short test summary info ====\nFAILED tests/a.py::b - assert 1\nERROR tests/c.py\n"

    assert Result(1, f"{logged}1 failed, 1 error in 2.00s\n").failures == [
        "FAILED tests/a.py::b - assert 1",
        "ERROR tests/c.py",
    ]
    assert Result(0, "FAILED in a log\n1 passed in 2.00s\n").failures == []


def test_the_last_lines_of_a_part_that_broke_off_are_shown() -> None:
    assert Result(-11, "....\nFatal Python error: Segmentation fault\n").failures == [
        "exit code -11",
        "....",
        "Fatal Python error: Segmentation fault",
    ]


def test_a_part_that_selects_no_test_passes() -> None:
    assert Result(5, "9 deselected in 2.00s\n").has_passed


def test_each_file_is_in_one_part_per_dialect() -> None:
    """Except for the part by engine, which repeats some files."""
    files = [file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py")]
    with_database = [file for file in files if file.parts[1] not in WITHOUT_DATABASES]
    parts = [part for part in PARTS if not part.environ]

    for dialect in DIALECTS:
        of_dialect = [part for part in parts if dialect in part.dialect.split(",") and selects(part, "database")]
        found = Counter(file for part in of_dialect for file in with_database if has(part, file))
        assert found == Counter(with_database), dialect
    others = [part for part in parts if selects(part, "not database")]
    assert Counter(file for part in others for file in files if has(part, file)) == Counter(files)


def selects(part: Part, mark: str) -> bool:
    return mark in part.arguments or "-m" not in part.arguments


def has(part: Part, file: Path) -> bool:
    folders = [argument for argument in part.arguments if argument.startswith("tests/")]
    ignored = [one.removeprefix("--ignore=") for one in part.arguments if one.startswith("--ignore=")]
    return any(map(file.is_relative_to, folders or ["tests"])) and not any(map(file.is_relative_to, ignored))


def test_the_quick_parts_share_the_files() -> None:
    for cores in (1, 2, 5):
        shares = [part.arguments[2:] for part in quick(cores)]
        assert len(shares) == cores
        files = Counter(file for share in shares for file in share)
        assert files["tests/unit/test_parts.py"] == 1
        assert set(files.values()) == {1}
