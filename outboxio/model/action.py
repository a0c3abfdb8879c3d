"""Actions: units of domain work, and the rules for retrying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr

from outboxio.errors import ConfigurationError, InvalidEvent, SettingsError
from outboxio.model.event import NamedStructMeta
from outboxio.support.duration import Duration, default_duration, jittered, parse_duration
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.transaction import Transaction

Result_co = TypeVar("Result_co", covariant=True)

_LONGEST_DELAY = 10.0  # seconds: a user waits for an execute() call
_MOST_DOUBLINGS = 30  # of a microsecond, until that is reached


class Retry(Struct, frozen=True, kw_only=True):
    """When a failed action is retried, as a whole and in a new transaction.

    ``on``: one or more exception classes; subclasses match, and so do exceptions in the ``__cause__`` chain.
    ``attempts``: the total number of runs, including the first. ``delay``: the delay before the second run, doubled
    before each further run, with a jitter of 25 %. Failures are counted separately for each entry.

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
        attempts: Any = self.attempts  # callers may not be typed
        if not isinstance(attempts, int) or isinstance(attempts, bool) or attempts < 1:
            raise SettingsError("Retry.attempts", attempts, "1 or more: it counts every run, so it is a whole number")

    def matches(self, error: BaseException) -> bool:
        """True if the error, or a cause of the error, is an instance of ``on``."""
        return any(isinstance(e, self.on) for e in cause_chain(error))


Retries = Retry | Sequence[Retry]


class Action(Struct, frozen=True, metaclass=NamedStructMeta):
    """A unit of domain work that commits together with the events it emits. The fields are the parameters.

    Subclass Action and write ``perform``; ``execute`` returns its result. ``type_name="..."`` in the class statement
    sets a stored name other than the class's. ``retry`` determines which failures are retried. Stale records,
    serialization failures, deadlocks and tables that changed during the transaction are always retried.

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
        """Do the work in ``tx``, and emit events. A retry runs ``perform`` again from the start."""
        raise TypeError(f"{type(self).__name__} has no perform method: write `async def perform(self, tx)`")


def make_action_class(cls: Any, retry: tuple[Retry, ...]) -> None:
    """Turn a class that has a stored name into an action."""
    cls.__action_retry__ = retry


def is_action(cls: type) -> bool:
    """True for a subclass of :class:`Action` and for a class decorated with ``action``."""
    return issubclass(cls, Action) or "__action_retry__" in cls.__dict__


def name_and_retries(action: object) -> tuple[str, tuple[Retry, ...]]:
    """Return the stored name of an action, and the retries of its class. Raises :class:`InvalidEvent` otherwise."""
    cls: Any = type(action)
    if isinstance(action, Action):
        return cls.__type_name__, as_entries(action.retry)
    if not is_action(cls):
        reason = "is not an Action; define its class as `class X(Action)`"
        raise InvalidEvent("execute", f"{briefly(action)} {reason}", logged=f"a {cls.__name__} {reason}")
    return cls.__type_name__, cls.__action_retry__


class Performs(Protocol[Result_co]):
    """An action for the type checker: gives ``execute`` the result type of ``perform``."""

    async def perform(self, tx: Transaction) -> Result_co: ...


class RetryCounter:
    """Counts the failed runs of an execution, separately for each :class:`Retry` entry."""

    def __init__(self, entries: Sequence[Retry], otherwise: Callable[[BaseException], Retry | None]) -> None:
        self._entries = entries
        self._otherwise = otherwise
        self._failed: dict[Retry, int] = {}

    def delay_after(self, error: BaseException) -> float | None:
        """Return the seconds to wait before the next run, or ``None`` if there is none."""
        entry = next((e for e in self._entries if e.matches(error)), None) or self._otherwise(error)
        if entry is None:
            return None
        failed = self._failed[entry] = self._failed.get(entry, 0) + 1
        if failed >= entry.attempts:
            return None
        doubled = entry.delay.total_seconds() * 2 ** min(failed - 1, _MOST_DOUBLINGS)
        return jittered(min(doubled, _LONGEST_DELAY), 0.25)


def as_entries(retry: Retries) -> tuple[Retry, ...]:
    """Return the entries as a tuple. Raises :class:`ConfigurationError` for any other value."""
    if retry == ():
        return ()  # as most actions have it
    if isinstance(retry, Retry):
        return (retry,)
    value: Any = retry  # callers may not be typed
    try:
        entries: tuple[Any, ...] = tuple(value)
    except TypeError:
        entries = (value,)
    for entry in entries:
        if not isinstance(entry, Retry):
            raise ConfigurationError(f"retry is {briefly(retry)}; expected a Retry, or a list of them")
    return entries


def cause_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, each once even if the chain is circular."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__
