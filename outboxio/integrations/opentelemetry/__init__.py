"""OpenTelemetry: spans of actions, of written events and of handler runs, linked through the headers of the events.

Your application installs the SDK, the exporter and the sampler; this module needs only ``opentelemetry-api``. The names
of spans and attributes are in ``names.py``.
"""

from outboxio.errors import ConfigurationError

try:
    from outboxio.integrations.opentelemetry.handling import Propagation
    from outboxio.integrations.opentelemetry.tracing import OpenTelemetry, trace_headers
except ModuleNotFoundError as error:  # pragma: no cover
    if not (error.name or "").startswith("opentelemetry"):
        raise
    raise ConfigurationError(
        "outboxio.integrations.opentelemetry needs OpenTelemetry: pip install 'outboxio[opentelemetry]'"
    ) from error

__all__ = ["OpenTelemetry", "Propagation", "trace_headers"]
