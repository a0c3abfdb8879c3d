"""The handlers of the wallet service's events."""

from __future__ import annotations

from msgspec import Struct

from outboxio import EventEnvelope, EventHandler, Outbox, RetryPolicy, Unprocessable

from .domain import MoneyDeposited, MoneyMoved, MoneySent, ReceiptSent, WalletOpened

# --- external services ---------------------------------------------------------------------------


class Mailbox:
    """Stores the sent mail."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, text: str) -> None:
        self.sent.append(text)


class AccountClosed(Exception):
    """Raised if the account is closed; a retry would not help."""


class Bank:
    """A fake bank that does not answer the first calls, and has closed some accounts."""

    def __init__(self, outages: int, closed: set[str]) -> None:
        self.reports: list[str] = []
        self.closed = closed
        self._outages = outages

    async def report(self, sent: MoneySent) -> None:
        if sent.target in self.closed:
            raise AccountClosed(f"the account of {sent.target} is closed")
        if self._outages > 0:
            self._outages -= 1
            raise ConnectionError("no answer")
        self.reports.append(f"{sent.target} {sent.cents}")


class World(Struct):
    """The external services, which handlers access as ``envelope.resources``."""

    mailbox: Mailbox
    bank: Bank
    audit_trail: list[str]


# --- handlers ------------------------------------------------------------------------------------


async def welcome(envelope: EventEnvelope[WalletOpened]) -> None:
    world: World = envelope.resources
    await world.mailbox.send(f"Welcome, {envelope.event.wallet_id}!")


Deposited = EventEnvelope[MoneyDeposited]


async def send_receipt(envelope: Deposited) -> None:
    wallet_id = envelope.event.wallet_id
    await envelope.resources.mailbox.send(wallet_id)
    envelope.emit(ReceiptSent(wallet_id))


async def keep_trail(envelope: EventEnvelope[MoneyMoved]) -> None:
    world: World = envelope.resources
    world.audit_trail.append(f"{envelope.event_type} {envelope.event.cents / 100:.2f}")


async def file_receipt(envelope: EventEnvelope[ReceiptSent]) -> None:
    world: World = envelope.resources
    world.audit_trail.append(f"receipt of {envelope.event.wallet_id}")


Sent = EventEnvelope[MoneySent]


class NotifyBank(EventHandler[MoneySent]):
    name = "notify-bank"
    retry = RetryPolicy(base="200ms")

    def __init__(self, bank: Bank) -> None:
        self._bank = bank

    async def handle(self, envelope: Sent) -> None:
        try:
            await self._bank.report(envelope.event)
        except AccountClosed as error:
            raise Unprocessable(f"{error}") from error


def register(outbox: Outbox, world: World) -> None:
    outbox.handler(WalletOpened, name="welcome-mail")(welcome)
    outbox.handler(MoneyDeposited, name="receipt")(send_receipt)
    outbox.handler(ReceiptSent, name="filing")(file_receipt)
    outbox.handler(MoneyMoved, name="audit-trail")(keep_trail)
    outbox.add_handler(NotifyBank(world.bank))
