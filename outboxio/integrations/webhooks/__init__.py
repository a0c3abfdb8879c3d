"""Webhooks. ``verify`` checks the signature of a request that another service has sent.

Needs ``outboxio[webhooks]`` for Standard Webhooks. The schemes of Stripe, GitHub and Slack need no library.
"""

from outboxio.errors import InvalidSignature
from outboxio.integrations.webhooks.incoming import verify

__all__ = ["InvalidSignature", "verify"]
