"""``outboxio demo``: runs the wallet example, which is shipped with the package."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from outboxio.cli.answer import Exit, terminal

_NAME = "outboxio.examples.wallets"


async def demo(database: str | None) -> Exit:
    """Run the example on a database; the answer is no if the balances do not add up."""
    _load_wallets()
    story = importlib.import_module(f"{_NAME}.demo")
    return Exit.FINE if await story.run(database, terminal()) else Exit.NO


def _load_wallets() -> None:
    """Make the example importable under the same name from the wheel and from a source checkout."""
    if _NAME not in sys.modules:
        spec = _spec()
        package: ModuleType = module_from_spec(spec)
        sys.modules[_NAME] = package
        assert spec.loader is not None
        spec.loader.exec_module(package)


def _spec() -> ModuleSpec:
    package = Path(__file__).parents[2]
    folders = (package / "examples" / "wallets", package.parent / "examples" / "wallets")
    folder = next(folder for folder in folders if folder.is_dir())
    spec = spec_from_file_location(_NAME, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    return spec
