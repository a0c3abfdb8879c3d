"""The outbox: on the engine of the application, with the objects that handlers take by type."""

from outboxio import Outbox
from shop.database import Sessions, sessions
from shop.services import Bank, Mailer

outbox = Outbox(sessions, namespace="shop", resources={Mailer: Mailer(), Bank: Bank(), Sessions: sessions})
