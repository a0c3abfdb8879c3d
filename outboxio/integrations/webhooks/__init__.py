"""Webhooks as specified by Standard Webhooks: send events to customers, and verify requests from other services.

Requires ``outboxio[webhooks]``, except ``verify`` with the schemes of Stripe, GitHub and Slack.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outboxio.errors import ConfigurationError, InvalidSignature
from outboxio.integrations.webhooks.incoming import verify

if TYPE_CHECKING:
    from outboxio.integrations.webhooks.endpoint import Endpoint, WebhookEndpointDisabled
    from outboxio.integrations.webhooks.outgoing import Webhooks

__all__ = ["Endpoint", "InvalidSignature", "WebhookEndpointDisabled", "Webhooks", "verify"]

_OUTGOING = {"Endpoint": "endpoint", "WebhookEndpointDisabled": "endpoint", "Webhooks": "outgoing"}


def __getattr__(name: str) -> Any:
    if name not in _OUTGOING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_OUTGOING[name]}"), name)
    except ImportError as error:
        raise ConfigurationError(
            f"{__name__}.{name} needs httpcore and standardwebhooks: pip install 'outboxio[webhooks]'"
        ) from error
