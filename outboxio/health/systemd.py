"""Support for systemd's ``Type=notify`` and ``WatchdogSec=``, without a library."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from outboxio.support.log import log_of

logger = log_of(__name__)

SHARE_OF_WATCHDOG = 3  # signals per watchdog timeout


class ServiceManager:
    """Notifies the service manager that started this process of its state.

    Without a service manager (``NOTIFY_SOCKET`` is not set), calls have no effect. A failure to send a notification is
    logged once and otherwise ignored.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address_of(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog = _watchdog_of(environ) if self._address is not None else None
        """Seconds without a signal before the service manager kills the process; ``None`` without a watchdog."""
        self._is_reported = False

    def notify(self, *fields: str) -> None:
        """Send fields such as ``READY=1``."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(fields).encode(), self._address)
        except OSError as error:
            if not self._is_reported:
                logger.warning("could not send %s to the service manager: %s", ", ".join(fields), error)
            self._is_reported = True

    @asynccontextmanager
    async def watched(self, is_live: Callable[[], Awaitable[bool]]) -> AsyncGenerator[None]:
        """Signal the watchdog inside the block, as long as the process is live."""
        if self.watchdog is None:
            yield
            return
        feeding = asyncio.create_task(self._feed(self.watchdog / SHARE_OF_WATCHDOG, is_live), name="outboxio watchdog")
        try:
            yield
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})

    async def _feed(self, pause: float, is_live: Callable[[], Awaitable[bool]]) -> None:
        while True:
            try:
                if await is_live():
                    self.notify("WATCHDOG=1")
            except Exception:
                logger.exception("could not read the health of this process; skipping the watchdog signal")
            await asyncio.sleep(pause)


def _address_of(name: str) -> str | None:
    """Return the address of the socket. A name that begins with @ is an abstract Linux socket."""
    if name.startswith("/"):
        return name
    if name.startswith("@"):
        return f"\0{name[1:]}"
    if name:
        logger.warning("NOTIFY_SOCKET is %r; expected a path, or an abstract socket that begins with @", name)
    return None


def _watchdog_of(environ: Mapping[str, str]) -> float | None:
    """Return the watchdog timeout in seconds, if the watchdog is for this process."""
    micros, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(micros) / 1_000_000
