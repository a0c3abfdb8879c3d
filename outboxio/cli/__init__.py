"""The ``outboxio`` command."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command. Without the extra ``cli``, name the packages to install and exit with 2."""
    if missing := [name for name in ("typer", "rich") if find_spec(name) is None]:
        print(f"The outboxio command needs {' and '.join(missing)}: pip install 'outboxio[cli]'", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # replace characters that the terminal cannot encode
    from outboxio.cli.app import app
    from outboxio.cli.commands.dashboard import answer_shells

    answer_shells()
    app(prog_name="outboxio")
