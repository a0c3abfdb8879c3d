"""The installed wheel contains all files that outboxio reads at run time, and works outside of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

PROJECT = Path(__file__).parent.parent

# Isolated from the checkout, which an editable install would otherwise put on the path.
COUNT_SQL = """
import sys
sys.path.insert(0, sys.argv[1])
from importlib.resources import files
import outboxio
assert outboxio.__file__.startswith(sys.argv[1]), outboxio.__file__
for dialect in ("postgres", "sqlite"):
    scripts = [each for each in files("outboxio").joinpath("sql", dialect).iterdir() if each.name.endswith(".sql")]
    assert scripts and all("schema_versions" in each.read_text(encoding="utf-8") for each in scripts), dialect
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Without isolation: the build backend is installed here, and the network is not needed.
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(PROJECT))
    [built] = folder.glob("outboxio-*.whl")
    return built


def run(*arguments: str, cwd: Path = PROJECT) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


def names_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("dialect", ["postgres", "sqlite"])
def test_the_wheel_contains_every_sql_file_of_the_checkout(wheel: Path, dialect: str) -> None:
    scripts = {f"outboxio/sql/{dialect}/{each.name}" for each in (PROJECT / "sql" / dialect).glob("*.sql")}
    assert scripts
    assert scripts <= names_in(wheel)


def test_the_wheel_contains_the_templates_and_files_of_the_dashboard(wheel: Path) -> None:
    folders = [PROJECT / "outboxio" / "dashboard" / name for name in ("templates", "static")]
    files = {each.relative_to(PROJECT).as_posix() for folder in folders for each in folder.iterdir()}

    assert {"outboxio/dashboard/templates/base.html", "outboxio/dashboard/static/outboxio.css"} <= files
    assert files <= names_in(wheel)


def test_the_wheel_is_marked_as_typed(wheel: Path) -> None:
    assert "outboxio/py.typed" in names_in(wheel)


def test_the_wheel_contains_the_example_that_the_demo_runs(wheel: Path) -> None:
    assert any(name.startswith("outboxio/examples/wallets/") for name in names_in(wheel))


def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names_in(wheel)} == {
        "outboxio",
        "outboxio_pytest.py",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }


def test_an_installed_wheel_is_imported_and_finds_its_sql(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    run("-c", COUNT_SQL, str(target), cwd=tmp_path)


def test_pytest_finds_the_plugin_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    (tmp_path / "test_app.py").write_text(
        "import outboxio_pytest\n"
        "async def test_app(outbox_for_tests, outbox_events):\n"
        f"    assert outboxio_pytest.__file__.startswith({str(target)!r})\n"
        "    async with outbox_for_tests.transaction('Nothing'):\n"
        "        outbox_events.none()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", "test_app.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
