"""The service manager systemd: ``Type=notify`` and ``WatchdogSec=``, by one datagram each and without a library."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from outboxio.support.log import log_of

logger = log_of(__name__)

SHARE_OF_WATCHDOG = 3  # a watchdog is fed three times within its time


class ServiceManager:
    """Tells the service manager that started this process how far the process is.

    Without a service manager (``NOTIFY_SOCKET`` is not set) each call does nothing. A datagram that cannot be sent is
    logged, and ends nothing.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address_of(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog = _watchdog_of(environ) if self._address is not None else None
        """The seconds after which the service manager ends a process that is silent; ``None`` without a watchdog."""
        self._is_told = False

    def tell(self, *fields: str) -> None:
        """Send fields such as ``READY=1``."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(fields).encode(), self._address)
        except OSError as error:
            if not self._is_told:
                logger.warning("the service manager does not take %s: %s", ", ".join(fields), error)
            self._is_told = True

    @asynccontextmanager
    async def watched(self, is_live: Callable[[], Awaitable[bool]]) -> AsyncGenerator[None]:
        """Feed the watchdog while the block lasts, for as long as the process is live."""
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
                    self.tell("WATCHDOG=1")
            except Exception:
                logger.exception("the health of this process could not be read, so the watchdog is not fed")
            await asyncio.sleep(pause)


def _address_of(name: str) -> str | None:
    """The address of the socket. A name that begins with @ is an abstract socket of Linux."""
    if name.startswith("/"):
        return name
    if name.startswith("@"):
        return f"\0{name[1:]}"
    if name:
        logger.warning("NOTIFY_SOCKET is %r; expected a path, or an abstract socket that begins with @", name)
    return None


def _watchdog_of(environ: Mapping[str, str]) -> float | None:
    """The seconds of the watchdog, if the watchdog is that of this process."""
    micros, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(micros) / 1_000_000
