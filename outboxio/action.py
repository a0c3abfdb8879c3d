"""Actions: units of domain work, and when a failed one is run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

from outboxio.backoff import jittered
from outboxio.duration import Duration, default_duration, parse_duration
from outboxio.errors import SettingsError
from outboxio.event import NamedStructMeta

if TYPE_CHECKING:
    from outboxio.transaction import Transaction

Result_co = TypeVar("Result_co", covariant=True)

_LONGEST_DELAY = 10.0  # seconds: an execute() call is somebody waiting


class Retry(Struct, frozen=True, kw_only=True):
    """When a failed action is run again, whole and in a new transaction.

    ``on``: an exception class or several; subclasses match, and so does an exception in the ``__cause__`` chain.
    ``attempts``: runs in all, the first included. ``delay``: the wait before the second run, doubled before each
    further one and varied by 25 % either way. Each entry keeps its own count.

    Example::

        class BookSeat(Action):
            retry = Retry(on=SeatTaken, attempts=5, delay="20ms")
    """

    on: type[BaseException] | tuple[type[BaseException], ...]
    attempts: int = 4
    delay: Duration = default_duration("50ms")

    def __post_init__(self) -> None:
        classes = self.on if isinstance(self.on, tuple) else (self.on,)
        if not all(isinstance(cls, type) and issubclass(cls, BaseException) for cls in classes):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise SettingsError("Retry.on", self.on, "an exception class, or a tuple of them")
        force_setattr(self, "delay", parse_duration(self.delay, key="Retry.delay"))
        if self.attempts < 1:
            raise SettingsError("Retry.attempts", self.attempts, "1 or more: it counts every run")

    def matches(self, error: BaseException) -> bool:
        """Whether the error, or one that it was raised from, is one of ``on``."""
        return any(isinstance(e, self.on) for e in cause_chain(error))


Retries = Retry | Sequence[Retry]


class Action(Struct, frozen=True, metaclass=NamedStructMeta):
    """One unit of domain work, committed with the events that it emits. Its fields are its parameters.

    Subclass it and write ``perform``; what that returns, ``execute`` returns. ``type_name="..."`` in the class
    statement stores another name than the class's. ``retry`` says which failures run the action again, besides stale
    records, serialization failures and deadlocks, which always do.

    Example::

        class OpenWallet(Action):
            owner: str

            async def perform(self, tx: Transaction) -> UUID:
                wallet_id = uuid4()
                await tx.execute("INSERT INTO wallets (id, owner) VALUES ($1, $2)", wallet_id, self.owner)
                tx.emit(WalletOpened(wallet_id), model_id=wallet_id, model_type="Wallet")
                return wallet_id
    """

    __type_name__: ClassVar[str]
    retry: ClassVar[Retries] = ()

    async def perform(self, tx: Transaction) -> Any:
        """Do the work on ``tx``, and emit what happened. Runs again, from the start, when it is retried."""
        raise TypeError(f"{type(self).__name__} has no perform method: write `async def perform(self, tx)`")


class Performs(Protocol[Result_co]):
    """An action, seen as what it returns: lets ``execute`` have the result type of ``perform``."""

    async def perform(self, tx: Transaction) -> Result_co: ...


class RetryCounter:
    """Counts the failed runs of one execution, apart for each :class:`Retry` entry."""

    def __init__(self, entries: Sequence[Retry], otherwise: Callable[[BaseException], Retry | None]) -> None:
        self._entries = entries
        self._otherwise = otherwise
        self._failed: dict[Retry, int] = {}

    def delay_after(self, error: BaseException) -> float | None:
        """Seconds to wait before the next run, or ``None`` if there is none."""
        entry = next((e for e in self._entries if e.matches(error)), None) or self._otherwise(error)
        if entry is None:
            return None
        failed = self._failed[entry] = self._failed.get(entry, 0) + 1
        if failed >= entry.attempts:
            return None
        return jittered(min(entry.delay.total_seconds() * 2 ** (failed - 1), _LONGEST_DELAY), 0.25)


def as_entries(retry: Retries) -> tuple[Retry, ...]:
    """One entry or several, as a tuple."""
    return (retry,) if isinstance(retry, Retry) else tuple(retry)


def cause_chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it was raised from, each once even if the chain bites its tail."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__
