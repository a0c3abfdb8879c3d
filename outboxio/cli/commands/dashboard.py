"""``outboxio dashboard``: serves the dashboard from a terminal, on this machine unless a password is given."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import Struct

from outboxio.cli.answer import Exit, line, say, say_json
from outboxio.cli.asking import actor
from outboxio.cli.commands.signals import signalled
from outboxio.cli.target import TargetError
from outboxio.outbox import Outbox

if TYPE_CHECKING:
    from starlette.requests import Request

    from outboxio.dashboard import Access, Authorize


class Serving(Struct, frozen=True):
    """Where the dashboard listens, and for whom."""

    host: str
    port: int
    auth_env: str | None = None
    """The environment variable with the password; ``None`` for a dashboard on this machine without a password."""
    user: str = "ops"
    read_only: bool = False


def refuse_open(serving: Serving) -> None:
    """Raise :class:`TargetError` for an address that other machines reach, without a password."""
    if serving.auth_env is None and not is_loopback(serving.host):
        raise TargetError(
            f"--host {serving.host} can be reached from other machines: give --auth-env NAME, the environment "
            "variable with the password"
        )


async def serve(outbox: Outbox, serving: Serving, *, as_json: bool = False) -> Exit:
    """Serve until a signal comes."""
    uvicorn, app = _uvicorn(), _app(outbox, serving)
    config = uvicorn.Config(
        app, host=serving.host, port=serving.port, log_level="warning", lifespan="off", timeout_graceful_shutdown=5
    )
    server = _without_signals(uvicorn)(config)
    listening = config.bind_socket()
    listening.listen(config.backlog)  # the server listens later; a browser may come as soon as the address is told
    port = listening.getsockname()[1]
    try:
        with signalled() as stop:
            serves = asyncio.ensure_future(server.serve([listening]))
            _tell(outbox.namespace, serving.host, port, as_json=as_json)
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait((serves, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            server.should_exit = True
            await serves
    finally:
        listening.close()
    return Exit.FINE


def _tell(namespace: str, host: str, port: int, *, as_json: bool) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    if as_json:
        say_json({"namespace": namespace, "url": url})
        sys.stdout.flush()
    else:
        say(line("dashboard of ", (namespace, "bold"), ": ", (url, "cyan")))


def is_loopback(host: str) -> bool:
    """True for a name or address that only this machine reaches."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def only_here(request: Request) -> Access | None:
    """All rights for the user of this machine.

    The page must have been asked for by a name of this machine: a foreign site can let a name of its own lead to
    127.0.0.1, and a browser would let the site read the pages and send the forms.
    """
    from outboxio.dashboard import Access

    asked = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    return Access.admin(actor()) if is_loopback(asked) else None


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
    """The server of uvicorn, which leaves the signals to this command."""

    class Server(uvicorn.Server):  # type: ignore[misc]  # imported by the call, so a checker knows no base
        def capture_signals(self) -> Any:
            return nullcontext()

    return Server
