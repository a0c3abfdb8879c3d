"""``outboxio completion``, ``demo`` and ``dashboard``."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from outboxio.cli.commands.worker import signalled
from outboxio.cli.options import Options
from outboxio.cli.output import Exit, actor, echo, echo_json, line, terminal
from outboxio.cli.target import TargetError
from outboxio.outbox import Outbox

if TYPE_CHECKING:
    from starlette.requests import Request

    from outboxio.dashboard import Access, Authorize


VARIABLE = "_OUTBOXIO_COMPLETE"
"""The environment variable with which a shell's completion script requests completions."""

completion: Any = import_module("typer.completion")  # its types are not exported

Shell = Literal["bash", "zsh", "fish", "powershell"]


def script(shell: Shell) -> str:
    """Return the completion script of a shell."""
    return str(completion.get_completion_script(prog_name="outboxio", complete_var=VARIABLE, shell=shell))


def answer_shells() -> None:
    """Print completions, if a shell requests them."""
    if VARIABLE in os.environ:
        completion.completion_init()


def print_script(shell: Shell) -> None:
    typer.echo(script(shell))


# --- ``outboxio demo``: runs the wallet example of the package ------------------------------------


_NAME = "outboxio.examples.wallets"


async def demo(database: str | None) -> Exit:
    """Run the example on a database. Fails if the balances do not add up."""
    _load_wallets()
    example = importlib.import_module(f"{_NAME}.demo")
    return Exit.OK if await example.run(database, terminal()) else Exit.FAILED


def _load_wallets() -> None:
    """Make the example importable under one name, from the wheel and from a source checkout."""
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


# --- ``outboxio dashboard``: only for this machine, unless there is a password --------------------


class Serving(Options, frozen=True):
    """Where the dashboard listens, and who may use it."""

    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on. Other than localhost, requires --auth-env.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Port; 0 for a free port.")] = 8900
    auth_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable with the password of the dashboard.", show_default=False
        ),
    ] = None
    user: Annotated[str, typer.Option(metavar="USER", help="With --auth-env: the user name.")] = "ops"
    read_only: Annotated[bool, typer.Option("--read-only", help="Disable all operations.")] = False


def refuse_open(serving: Serving) -> None:
    """Raise :class:`TargetError` for an address that other machines can reach, without a password."""
    if serving.auth_env is None and not is_loopback(serving.host):
        raise TargetError(
            f"--host {serving.host} can be reached from other machines: add --auth-env NAME, the environment "
            "variable with the password"
        )


async def serve(outbox: Outbox, serving: Serving, *, as_json: bool = False) -> Exit:
    """Serve until a signal arrives."""
    uvicorn, app = _uvicorn(), _app(outbox, serving)
    config = uvicorn.Config(
        app, host=serving.host, port=serving.port, log_level="warning", lifespan="off", timeout_graceful_shutdown=5
    )
    server = _without_signals(uvicorn)(config)
    listening = config.bind_socket()
    listening.listen(
        config.backlog
    )  # a browser may connect as soon as the address is printed, before the server listens
    port = listening.getsockname()[1]
    try:
        with signalled() as stop:
            serves = asyncio.ensure_future(server.serve([listening]))
            _print_address(outbox.namespace, serving.host, port, as_json=as_json)
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait((serves, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            server.should_exit = True
            await serves
    finally:
        listening.close()
    return Exit.OK


def _print_address(namespace: str, host: str, port: int, *, as_json: bool) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    if as_json:
        echo_json({"namespace": namespace, "url": url})
        sys.stdout.flush()
    else:
        echo(line("dashboard of ", (namespace, "bold"), ": ", (url, "cyan")))


def is_loopback(host: str) -> bool:
    """True for a name or address that only this machine reaches."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def only_here(request: Request) -> Access | None:
    """Grant all rights to the user of this machine.

    The Host header must name this machine. Otherwise a malicious site could let its own name resolve to 127.0.0.1
    (DNS rebinding), and a browser would let it read the pages and send the forms.
    """
    from outboxio.dashboard import Access

    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    return Access.admin(actor()) if is_loopback(host) else None


def _app(outbox: Outbox, serving: Serving) -> Any:
    from outboxio.dashboard import Dashboard, basic_auth

    authorize: Authorize = only_here
    if serving.auth_env is not None:
        authorize = basic_auth(serving.user, password_env=serving.auth_env)
    return Dashboard(outbox, authorize=authorize, read_only=serving.read_only)


def _uvicorn() -> Any:
    try:
        return importlib.import_module("uvicorn")
    except ImportError as error:
        raise TargetError("outboxio dashboard needs uvicorn: pip install 'outboxio[dashboard]'") from error


def _without_signals(uvicorn: Any) -> Any:
    """Return a uvicorn server class that leaves signals to this command."""

    class Server(uvicorn.Server):  # type: ignore[misc]  # imported at run time, so type checkers do not know the base
        def capture_signals(self) -> Any:
            return nullcontext()

    return Server
