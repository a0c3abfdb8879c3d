"""The outbox, on the engine of the service. Web processes only write to it; see ``worker.py`` for the handlers."""

from outboxio import Outbox
from service.database import sessions
from service.mail import Mailer

outbox = Outbox(sessions, namespace="orders", resources={Mailer: Mailer()})
