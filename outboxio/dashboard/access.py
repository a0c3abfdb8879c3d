"""What each user may see and do."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Self

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from outboxio.errors import ConfigurationError
from outboxio.operations.arguments import name_argument
from outboxio.support.text import briefly

RIGHTS = (
    "view", "payloads", "retry", "skip", "cancel", "resume", "replay", "backfill", "pause", "run_job", "stop", "purge",
    "unsubscribe",
)  # fmt: skip
"""All rights. Every access includes ``view``. ``pause`` covers pausing and unpausing handlers and jobs, and letting
outboxio choose a handler's number of partitions; ``unsubscribe`` covers removing handlers and jobs."""

READING = frozenset({"view", "payloads"})
"""The rights that change nothing."""

_OPERATOR = frozenset(RIGHTS) - {"purge", "unsubscribe"}


class Access:
    """The name of a user, and the user's rights. The name is recorded with each operation.

    ``can``: names of rights, see ``RIGHTS``. Every user may ``view``. Without ``payloads``, the pages show ids, types
    and states, but no payloads, parameters, headers or error messages.

    Raises :class:`ConfigurationError` for an unknown right.

    Example::

        Access("ada@example.org", can={"retry", "skip", "pause"})
        Access.viewer("grace@example.org")
    """

    def __init__(self, actor: str, can: Iterable[str] = ()) -> None:
        self.actor = name_argument(actor, "actor")
        self.can = frozenset({"view", *can})
        if unknown := sorted(self.can - set(RIGHTS)):
            raise ConfigurationError(f"there is no right {briefly(unknown[0])}; the rights are {', '.join(RIGHTS)}")

    @classmethod
    def viewer(cls, actor: str) -> Self:
        """Return read-only access, without payloads."""
        return cls(actor)

    @classmethod
    def operator(cls, actor: str) -> Self:
        """Return all rights except ``purge`` and ``unsubscribe``, which remove rows."""
        return cls(actor, _OPERATOR)

    @classmethod
    def admin(cls, actor: str) -> Self:
        """Return all rights."""
        return cls(actor, RIGHTS)

    def may(self, right: str) -> bool:
        """True if the user has this right."""
        return right in self.can

    @property
    def may_operate(self) -> bool:
        """True if the user may run at least one operation."""
        return not self.can <= READING

    def reading(self) -> Access:
        """Return the same user without the rights that change rows."""
        return Access(self.actor, self.can & READING)

    def __repr__(self) -> str:
        return f"Access({self.actor!r}, can={sorted(self.can)})"


Allowed = Access | Response | None
Authorize = Callable[[Request], Allowed | Awaitable[Allowed]]
"""Authorizes a request. Returns an :class:`Access`, ``None`` (responds with 404), or a response, such as a redirect to
a login page. May be async."""


def allow_all(request: Request) -> Access:
    """Grant all rights to every request, as ``anonymous``. For a dashboard that only operators can reach."""
    return Access.admin("anonymous")


def basic_auth(user: str, *, password_env: str, access: Callable[[str], Access] = Access.admin) -> Authorize:
    """Authorize a single user with a password (HTTP Basic). Use HTTPS: browsers send the password unencrypted.

    ``password_env``: the environment variable with the password, read once, by this call. ``access``: returns the
    rights for the user name. Raises :class:`ConfigurationError` if the variable is not set or empty.

    Example::

        Dashboard(outbox, authorize=basic_auth("ops", password_env="OUTBOX_PASSWORD", access=Access.operator))
    """
    password = os.environ.get(password_env, "")
    if not password:
        raise ConfigurationError(
            f"the environment variable {password_env} is not set; set it to the password of {user!r}"
        )
    if ":" in user:
        raise ConfigurationError(
            f"the user name {user!r} contains a colon, which HTTP Basic authentication does not support"
        )
    allowed, expected = access(user), f"{user}:{password}".encode()

    def authorize(request: Request) -> Access | Response:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic" and hmac.compare_digest(_decoded(credentials), expected):
            return allowed
        challenge = {"www-authenticate": 'Basic realm="outbox", charset="UTF-8"'}
        return PlainTextResponse("Enter user name and password.\n", 401, challenge)

    return authorize


def _decoded(credentials: str) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True)
    except (binascii.Error, ValueError):
        return b""
