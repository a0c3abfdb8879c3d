"""Build the site into a folder, and serve a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # no stubs are installed

from website.navigation import navigation
from website.plain import write_plain
from website.stage import ROOT, stage

WORK = ROOT / "build"


def build(work: Path = WORK) -> Path:
    """Build the site below ``work`` and return its folder. Raises ``CalledProcessError`` if Zensical fails."""
    pages, site = work / "pages", work / "site"
    stage(pages)
    nav = navigation(pages)
    config: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    handlers = config["plugins"][-1]["mkdocstrings"]["handlers"]["python"]
    handlers["paths"] = [str(ROOT)]
    handlers["options"]["extensions"] = [str(ROOT / "website" / "docstrings.py")]
    config |= {"docs_dir": "pages", "site_dir": "site", "nav": nav}
    file = work / "mkdocs.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "-f", str(file)]
    subprocess.run(command, cwd=work, check=True, env={**os.environ, "NO_COLOR": "1"})
    write_plain(pages, site, nav)
    return site


def add_version(site: Path, versions: Path, version: str) -> list[Path]:
    """Copy a site into the folder of its version and into ``latest``, and return both. Keep other versions."""
    made = [versions / version, versions / "latest"]
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(site, folder)
    return made


def serve(site: Path, port: int) -> None:
    """Serve a folder on the loopback address until Ctrl-C."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"the documentation: http://127.0.0.1:{server.server_port}/  (Ctrl-C stops it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
