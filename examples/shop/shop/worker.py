"""The worker, a separate process: ``outboxio worker shop.worker:outbox``. Only workers import the handlers."""

from shop.handlers import handlers
from shop.outbox import outbox

__all__ = ["outbox"]

outbox.include(handlers)
