"""examples/shop, the application of the tutorial: its migrations and its tests, from a copy of the folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHOP_FILES = shutil.ignore_patterns("build", "__pycache__", ".pytest_cache", "*.db*")


class Shop:
    """A copy of the shop, as a reader would copy it."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(ROOT / "examples" / "shop", folder, ignore=SHOP_FILES)
        self._folder = folder

    def run(self, module: str, *arguments: str, **environment: str) -> str:
        """The output of a command that must succeed."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        result = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self._folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150,
            check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout
        return result.stdout


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop")


def test_the_models_of_the_shop_match_the_migrations(shop: Shop) -> None:
    shop.run("alembic", "upgrade", "head", DATABASE="sqlite:///shop.db")
    shop.run("alembic", "check", DATABASE="sqlite:///shop.db")


TESTS_OF_SHOP = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "outboxio_pytest")


def test_the_tests_of_the_shop_pass_on_a_file(shop: Shop) -> None:
    shop.run(*TESTS_OF_SHOP, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_the_tests_of_the_shop_pass_on_a_server(shop: Shop, postgres_url: str) -> None:
    shop.run(*TESTS_OF_SHOP, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TEST_DATABASE=postgres_url)
