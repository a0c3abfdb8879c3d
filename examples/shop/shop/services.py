"""The external services: a mail server and a bank. Both are fakes that print; an application has clients here."""

from collections import Counter


class CardDeclined(Exception):
    """Raised if the bank declines the card; a retry would be declined too."""


class Mailer:
    async def send(self, to: str, subject: str) -> None:
        print(f"mail to {to}: {subject}", flush=True)


class Bank:
    """A fake bank: it does not answer the first call for the card ``slow``, and declines the card ``expired``."""

    def __init__(self) -> None:
        self.charged: dict[str, int] = {}
        self._calls = Counter[str]()

    async def charge(self, key: str, card: str, cents: int) -> None:
        """Charge the card once per ``key``, no matter how often the handler calls."""
        self._calls[key] += 1
        if card == "slow" and self._calls[key] == 1:
            print(f"bank: {key}, no answer", flush=True)
            raise ConnectionError("the bank did not answer")
        if card == "expired":
            print(f"bank: {key}, declined", flush=True)
            raise CardDeclined("the card has expired")
        if key not in self.charged:
            self.charged[key] = cents
            print(f"bank: {key}, {cents / 100:.2f} charged", flush=True)
