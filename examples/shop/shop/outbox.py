"""The outbox, on the application's engine, with the resources that handlers receive by type."""

from outboxio import Outbox
from shop.database import Sessions, sessions
from shop.services import Bank, Mailer
from shop.tracing import open_telemetry

outbox = Outbox(
    sessions,
    namespace="shop",
    resources={Mailer: Mailer(), Bank: Bank(), Sessions: sessions},
    telemetry=open_telemetry(),
)
