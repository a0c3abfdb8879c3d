"""The handlers of the wallet service's events, and the two versions of the service with different handlers."""

from __future__ import annotations

from datetime import timedelta

from msgspec import Struct

from outboxio import EventEnvelope, EventHandler, Outbox, RetryPolicy

from .domain import MoneyDeposited, MoneyMoved, MoneyTransferred, PayBonus, ReceiptSent, WalletOpened

HOUSE = "house"
BONUS, BONUS_FROM = 5_00, 100_00

# --- the world outside ---------------------------------------------------------------------------


class Mailbox:
    """Keeps the sent mail."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, text: str) -> None:
        self.sent.append(text)


class Bank:
    """A bank that does not answer the first calls."""

    def __init__(self, outages: int) -> None:
        self.reports: list[str] = []
        self._outages = outages

    async def report(self, text: str) -> None:
        if self._outages > 0:
            self._outages -= 1
            raise ConnectionError("no answer")
        self.reports.append(text)


class World(Struct):
    """The outside world: the handlers find this object in ``envelope.resources``."""

    mailbox: Mailbox
    bank: Bank
    audit_trail: list[str]


# --- handlers ------------------------------------------------------------------------------------


async def welcome(envelope: EventEnvelope[WalletOpened]) -> None:
    world: World = envelope.resources
    await world.mailbox.send(f"Welcome, {envelope.event.owner}!")


async def send_receipt(envelope: EventEnvelope[MoneyDeposited]) -> None:
    """The emitted event commits together with the handler's success."""
    world: World = envelope.resources
    wallet_id, cents = envelope.event.wallet_id, envelope.event.cents
    await world.mailbox.send(f"{wallet_id}, we received {cents / 100:.2f}.")
    envelope.emit(ReceiptSent(wallet_id, cents), model_id=wallet_id, model_type="Wallet")


async def pay_bonus(envelope: EventEnvelope[MoneyDeposited]) -> None:
    """Executes a second action, whose events name the cause."""
    if envelope.event.cents >= BONUS_FROM:
        await envelope.execute(PayBonus(HOUSE, envelope.event.wallet_id, BONUS))


async def keep_trail(envelope: EventEnvelope[MoneyMoved]) -> None:
    world: World = envelope.resources
    world.audit_trail.append(f"{envelope.event_type} {envelope.event.cents / 100:.2f}")


class NotifyBank(EventHandler[MoneyTransferred]):
    """The class form: options are attributes, and dependencies come through the constructor."""

    name = "notify-bank"
    retry = RetryPolicy(base=timedelta(milliseconds=200), max_attempts=5)

    def __init__(self, bank: Bank) -> None:
        self._bank = bank

    async def handle(self, envelope: EventEnvelope[MoneyTransferred]) -> None:
        await self._bank.report(f"{envelope.event.source} to {envelope.event.target}: {envelope.event.cents / 100:.2f}")


# --- the two versions ------------------------------------------------------------------------------


def version_1(outbox: Outbox) -> None:
    outbox.handler(WalletOpened, name="welcome-mail")(welcome)
    outbox.handler(MoneyDeposited, name="receipt")(send_receipt)
    outbox.handler(MoneyDeposited, name="bonus")(pay_bonus)
    outbox.handler(MoneyMoved, name="audit-trail")(keep_trail)


def version_2(outbox: Outbox, world: World) -> None:
    """``receipt`` has a new name, and the old name as an alias: rows under the old name are still found."""
    outbox.handler(WalletOpened, name="welcome-mail")(welcome)
    outbox.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"})(send_receipt)
    outbox.handler(MoneyDeposited, name="bonus")(pay_bonus)
    outbox.handler(MoneyMoved, name="audit-trail")(keep_trail)
    outbox.add_handler(NotifyBank(world.bank))
