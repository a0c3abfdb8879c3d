"""Who may see and order what."""

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
from outboxio.operations.arguments import given_name
from outboxio.support.text import briefly

RIGHTS = (
    "view", "payloads", "retry", "skip", "cancel", "resume", "replay", "backfill", "pause", "run_job", "stop", "purge",
    "unsubscribe",
)  # fmt: skip
"""All rights. ``view`` is a part of every access. ``pause`` is the right to pause and unpause a handler or a job, and
to leave the number of partitions of a handler to outboxio; ``unsubscribe`` the right to forget a handler or a job."""

READING = frozenset({"view", "payloads"})
"""The rights that change nothing."""

_OPERATOR = frozenset(RIGHTS) - {"purge", "unsubscribe"}


class Access:
    """The name of a user, and the user's rights. The name is kept in the record of each order.

    ``can``: names of rights, see ``RIGHTS``. Every user may ``view``. Without ``payloads``, the pages show ids, types
    and states, and neither payloads, parameters, headers nor the messages of errors.

    Raises :class:`ConfigurationError` for a right that does not exist.

    Example::

        Access("ada@example.org", can={"retry", "skip", "pause"})
        Access.viewer("grace@example.org")
    """

    def __init__(self, actor: str, can: Iterable[str] = ()) -> None:
        self.actor = given_name(actor, "actor")
        self.can = frozenset({"view", *can})
        if unknown := sorted(self.can - set(RIGHTS)):
            raise ConfigurationError(f"there is no right {briefly(unknown[0])}; the rights are {', '.join(RIGHTS)}")

    @classmethod
    def viewer(cls, actor: str) -> Self:
        """The right to look, without payloads."""
        return cls(actor)

    @classmethod
    def operator(cls, actor: str) -> Self:
        """All rights but ``purge`` and ``unsubscribe``, which remove rows."""
        return cls(actor, _OPERATOR)

    @classmethod
    def admin(cls, actor: str) -> Self:
        """All rights."""
        return cls(actor, RIGHTS)

    def may(self, right: str) -> bool:
        """True if the user has this right."""
        return right in self.can

    @property
    def orders(self) -> bool:
        """True if the user has a right to change rows."""
        return not self.can <= READING

    def reading(self) -> Access:
        """The same user, without the rights that change rows."""
        return Access(self.actor, self.can & READING)

    def __repr__(self) -> str:
        return f"Access({self.actor!r}, can={sorted(self.can)})"


Allowed = Access | Response | None
Authorize = Callable[[Request], Allowed | Awaitable[Allowed]]
"""Decides about a request: an :class:`Access`, ``None`` (the answer is 404), or a response, such as a redirect to a
login page. The function may be async."""


def allow_all(request: Request) -> Access:
    """Every request has all rights, under the name ``anonymous``. For a page that only operators can reach."""
    return Access.admin("anonymous")


def basic_auth(user: str, *, password_env: str, access: Callable[[str], Access] = Access.admin) -> Authorize:
    """One user with a password, by HTTP Basic authentication. Use HTTPS: browsers send the password unencrypted.

    ``password_env``: the environment variable with the password, read once, here. ``access``: makes the rights of the
    user. Raises :class:`ConfigurationError` if the variable is not set, or empty.

    Example::

        Dashboard(outbox, authorize=basic_auth("ops", password_env="OUTBOX_PASSWORD", access=Access.operator))
    """
    password = os.environ.get(password_env, "")
    if not password:
        raise ConfigurationError(
            f"the environment variable {password_env} is not set; set it to the password of {user!r}"
        )
    if ":" in user:
        raise ConfigurationError(f"the user {user!r} has a colon, which HTTP Basic authentication cannot send")
    allowed, expected = access(user), f"{user}:{password}".encode()

    def authorize(request: Request) -> Access | Response:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic" and hmac.compare_digest(_decoded(given), expected):
            return allowed
        challenge = {"www-authenticate": 'Basic realm="outbox", charset="UTF-8"'}
        return PlainTextResponse("Give user and password.\n", 401, challenge)

    return authorize


def _decoded(credentials: str) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True)
    except (binascii.Error, ValueError):
        return b""
