"""Litestar: a plugin that runs the outbox with the application, and provides it to route handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.plugins import InitPlugin

if TYPE_CHECKING:
    from outboxio.outbox import Outbox


class OutboxPlugin(InitPlugin):
    """Runs the outbox while the application runs, inside your application's own lifespans.

    Route handlers get the outbox as the dependency ``outbox``, or under the name ``dependency``. The middleware
    :class:`~outboxio.integrations.starlette.OriginMiddleware` works in Litestar unchanged.

    Example::

        @post("/orders/{order_id:int}/payment")
        async def pay(order_id: FromPath[int], outbox: NamedDependency[Outbox]) -> None:
            await outbox.execute(PayOrder(order_id))

        app = Litestar([pay], plugins=[OutboxPlugin(outbox)], middleware=[OriginMiddleware])
    """

    def __init__(self, outbox: Outbox, *, dependency: str = "outbox") -> None:
        self._outbox = outbox
        self._dependency = dependency

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        app_config.lifespan.append(self._outbox.lifespan)  # pyright: ignore[reportUnknownMemberType]  # Litestar's type
        app_config.dependencies[self._dependency] = Provide(lambda: self._outbox, sync_to_thread=False)
        return app_config
