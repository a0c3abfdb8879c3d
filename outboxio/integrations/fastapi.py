"""FastAPI: the outbox as a dependency. Everything else is the same as for Starlette.

Example::

    @app.post("/orders/{order_id}/payment")
    async def pay(order_id: int, outbox: OutboxDep) -> None:
        await outbox.execute(PayOrder(order_id))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends

from outboxio.integrations.starlette import OriginMiddleware, add_exception_handlers, get_outbox

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

    OutboxDep = Annotated[Outbox, Depends(get_outbox)]
else:
    OutboxDep = Annotated[Any, Depends(get_outbox)]  # FastAPI ignores the type of a dependency

__all__ = ["OriginMiddleware", "OutboxDep", "add_exception_handlers", "get_outbox"]
