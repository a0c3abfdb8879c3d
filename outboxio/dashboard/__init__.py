"""The dashboard: pages that show operators what is wrong, and let them fix it. Needs ``outboxio[dashboard]``.

Example::

    from outboxio.dashboard import Access, Dashboard

    async def operators(request: Request) -> Access | None:
        user = await current_user(request)
        return Access.operator(user.email) if user.is_staff else None  # None: responds with 404

    app.mount("/outbox", Dashboard(outbox, authorize=operators))
"""

from __future__ import annotations

from importlib import import_module

from outboxio.errors import ConfigurationError

try:  # imported only to name a missing package; the modules below import what they use
    import_module("jinja2")
    import_module("starlette")
except ImportError as error:
    raise ConfigurationError(f"outboxio.dashboard needs {error.name}: pip install 'outboxio[dashboard]'") from error

from outboxio.dashboard.access import RIGHTS, Access, Authorize, allow_all, basic_auth
from outboxio.dashboard.app import Dashboard

__all__ = ["RIGHTS", "Access", "Authorize", "Dashboard", "allow_all", "basic_auth"]
