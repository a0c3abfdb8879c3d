"""Events: facts that happened, and the rows that they become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, ClassVar, dataclass_transform
from uuid import UUID

from msgspec import Struct, StructMeta, field
from msgspec.structs import replace

from outboxio.errors import AmbiguousTypeName, InvalidEvent

RECEIVED_ACTION = "inbox.receive"
"""The action of events that came in from outside. No class has this name."""

NAME_LENGTH = 255
"""The longest name, key or id that a column holds, in characters."""


def checked_name(value: object, subject: str) -> str:
    """``value`` if a name column can hold it; otherwise :class:`InvalidEvent`, naming ``subject``."""
    text = checked_text(value, subject)
    if not text.strip():
        raise InvalidEvent(subject, f"{text!r} is blank")
    return text


def checked_text(value: object, subject: str) -> str:
    """``value`` if a varchar column can hold it; otherwise :class:`InvalidEvent`, naming ``subject``."""
    if not isinstance(value, str):
        raise InvalidEvent(subject, f"{value!r} is no string")
    if len(value) > NAME_LENGTH:
        raise InvalidEvent(subject, f"{value[:40]!r}... has {len(value)} characters; the column holds {NAME_LENGTH}")
    if "\0" in value:
        raise InvalidEvent(subject, f"{value!r} contains NUL (U+0000), which text columns cannot store")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidEvent(subject, f"{value!r} contains a lone surrogate, which is no Unicode text") from None
    return value


def _not_text(aliases: Iterable[str], name: str) -> Iterable[str]:
    if isinstance(aliases, str):
        raise InvalidEvent(f"aliases of {name}", f"{aliases!r} is one string; give a set of names: {{{aliases!r}}}")
    return aliases


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class NamedStructMeta(StructMeta):
    """Gives a struct class the name under which its rows are stored, apart from the class's own name."""

    __type_name__: str
    __type_aliases__: frozenset[str]

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        type_name: str | None = None,
        aliases: Iterable[str] = (),
        **config: Any,
    ) -> Any:
        cls = super().__new__(mcls, name, bases, namespace, **config)
        cls.__type_name__ = checked_name(type_name if type_name is not None else name, f"type_name of {name}")
        cls.__type_aliases__ = frozenset(checked_name(a, f"an alias of {name}") for a in _not_text(aliases, name))
        return cls


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class EventMeta(NamedStructMeta):
    """The class statement of an event, which may say that the priority of its handlers is strict."""

    __strict_priority__: bool

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        strict_priority: bool | None = None,
        **options: Any,
    ) -> Any:
        cls = super().__new__(mcls, name, bases, namespace, **options)
        if strict_priority is not None:
            cls.__strict_priority__ = strict_priority
        return cls


class Event(Struct, frozen=True, metaclass=EventMeta):
    """A fact that happened. Subclass it; the fields are its payload.

    Rows carry the class's simple name, or ``type_name``. A renamed class keeps reading old rows through its
    ``aliases``. With ``strict_priority=True`` a handler of it starts only after every handler with a lower
    ``priority`` has ended its first attempt at the same event, whatever came of it; subclasses inherit that.

    Example::

        class MoneyDeposited(Event):
            wallet_id: UUID
            amount: Decimal

        class WalletOpened(Event, type_name="WalletOpened", aliases={"WalletCreated"}):
            wallet_id: UUID
    """

    __type_name__: ClassVar[str]
    __type_aliases__: ClassVar[frozenset[str]]
    __strict_priority__: ClassVar[bool] = False


def type_name(cls: type[Event]) -> str:
    """The name under which events of this class are stored."""
    return cls.__type_name__


def type_names(cls: type[Event]) -> frozenset[str]:
    """Every name under which rows of this class may be found: its own and its aliases."""
    return cls.__type_aliases__ | {cls.__type_name__}


def is_strict(cls: type[Event]) -> bool:
    """Whether the priority of this event's handlers is strict."""
    return cls.__strict_priority__


def with_subclasses(cls: type[Event]) -> Iterator[type[Event]]:
    """The class and every class below it that is defined so far."""
    yield cls
    for subclass in cls.__subclasses__():
        yield from with_subclasses(subclass)


class EventTypes:
    """Which class each event type name stands for, in one outbox. Two classes with one name are refused."""

    def __init__(self) -> None:
        self._classes: dict[str, type[Event]] = {}
        self._known: set[type[Event]] = set()

    def register(self, cls: type[Event]) -> str:
        """Take a class in, and return its name; raise :class:`AmbiguousTypeName` if another class has it."""
        if cls not in self._known:
            for name in type_names(cls):
                other = self._classes.get(name)
                if other is not None and other is not cls:
                    raise AmbiguousTypeName(name, other, cls)
            self._classes.update(dict.fromkeys(type_names(cls), cls))
            self._known.add(cls)
        return cls.__type_name__

    def find(self, name: str) -> type[Event] | None:
        """The class that was registered under this name or alias."""
        return self._classes.get(name)

    def __iter__(self) -> Iterator[type[Event]]:
        return iter(self._known)


class ActionRecord(Struct, frozen=True, kw_only=True):
    """What the rows of one action share: the columns of ``events`` that say who did it, and why."""

    namespace: str
    action_id: UUID
    action_name: str
    action_params: str
    started_date: datetime
    completion_date: datetime
    source: str | None = None
    correlation_id: str | None = None
    causation_id: UUID | None = None
    headers: str | None = None
    hops: int = 0

    def completed(self, moment: datetime) -> ActionRecord:
        """The same action, completed at this moment."""
        return replace(self, completion_date=moment)


class EventRecord(Struct, frozen=True, kw_only=True):
    """What is one event's own in its ``events`` row. The sentinel of an action without events has only an id."""

    id: UUID
    event_type: str | None = None
    payload: str | None = None
    model_id: str | None = None
    model_type: str | None = None
    ordering_key: str | None = None
    topic: str | None = None
    available_at: datetime | None = None
