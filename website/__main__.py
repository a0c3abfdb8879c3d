"""``python -m website``: build the documentation site; ``--serve`` serves it, ``--version 1.2`` adds a version."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from website.build import WORK, add_version, build, serve
from website.links import problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m website", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve the site afterwards")
    parser.add_argument("--port", type=int, default=8000, help="port for --serve; 0 for a free port (default: 8000)")
    parser.add_argument("--version", metavar="X.Y", help="copy the site to the folders X.Y and latest in --into")
    parser.add_argument("--into", type=Path, default=WORK / "sites", help="folder with the versions")
    options = parser.parse_args()
    site = build()
    broken = problems(site)
    print("\n".join(broken), file=sys.stderr)
    if options.version:
        print(*add_version(site, options.into, options.version))
    if options.serve and not broken:
        serve(site, options.port)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
