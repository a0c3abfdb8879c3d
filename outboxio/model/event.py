"""Events: facts that happened, and the records of event rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from datetime import datetime
from typing import Any, ClassVar, cast, dataclass_transform
from uuid import UUID

import msgspec
from msgspec import Struct, StructMeta, field
from msgspec.structs import replace

from outboxio.errors import AmbiguousTypeName, InvalidEvent
from outboxio.model.payloads.classes import AnyEvent, Upcast, checked_version, with_own
from outboxio.model.payloads.models import rename_of
from outboxio.support.codec import leaves_of
from outboxio.support.text import TextEncoding, briefly

RECEIVED_ACTION = "inbox.receive"
"""The action of events from the inbox. No class has this name."""

BOOTSTRAP_ACTION = "outboxio.bootstrap"
"""The action of the chunks of a bootstrap, whose events are snapshots of rows. No class has this name."""

NAME_LENGTH = 255
"""The longest name, key or id that a column holds, in characters."""


def checked_name(value: object, subject: str) -> str:
    """Return ``value``. Raises :class:`InvalidEvent`, naming ``subject``, if a name column cannot hold it."""
    text = checked_text(value, subject)
    if not text.strip():
        raise InvalidEvent(subject, f"{text!r} is blank")
    return text


def checked_text(value: object, subject: str) -> str:
    """Return ``value``. Raises :class:`InvalidEvent`, naming ``subject``, if a varchar column cannot hold it."""
    if not isinstance(value, str):
        raise InvalidEvent(subject, f"{briefly(value)} is not a string")
    if len(value) > NAME_LENGTH:
        raise InvalidEvent(subject, f"{value[:40]!r}... has {len(value)} characters; the column holds {NAME_LENGTH}")
    if "\0" in value:
        raise InvalidEvent(subject, f"{value!r} contains NUL (U+0000), which text columns cannot store")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidEvent(subject, f"{value!r} contains a lone surrogate, which is not valid Unicode") from None
    return value


def _not_text(aliases: Iterable[str], name: str) -> Iterable[str]:
    if isinstance(aliases, str):
        raise InvalidEvent(f"aliases of {name}", f"{aliases!r} is one string; pass a set of names: {{{aliases!r}}}")
    return aliases


def name_class(cls: Any, type_name: str | None, aliases: Iterable[str]) -> None:
    """Set the stored names of a class. Raises :class:`InvalidEvent` for a name that cannot be stored."""
    name = cls.__name__
    cls.__type_name__ = checked_name(type_name if type_name is not None else name, f"type_name of {name}")
    cls.__type_aliases__ = frozenset(checked_name(a, f"an alias of {name}") for a in _not_text(aliases, name))


def make_event_class(cls: Any, version: int) -> None:
    """Turn a class with stored names into an event class. Raises :class:`InvalidEvent` for an invalid version."""
    cls.__event_version__ = checked_version(version, f"version of {cls.__name__}")
    cls.__event_upcasters__ = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class NamedStructMeta(StructMeta):
    """Gives a struct class a stored name, which may differ from the name of the class."""

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
        name_class(cls, type_name, aliases)
        return cls


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class EventMeta(NamedStructMeta):
    """Handles the class statement of an event, with the options ``strict_priority``, ``version`` and ``json_style``."""

    __strict_priority__: bool

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        strict_priority: bool | None = None,
        version: int = 1,
        json_style: str | None = None,
        **options: Any,
    ) -> Any:
        if json_style is not None:
            options.setdefault("rename", rename_of(json_style, name))
        cls = super().__new__(mcls, name, bases, namespace, **options)
        make_event_class(cls, version)
        if json_style is not None:
            cls.__json_style__ = json_style
        if strict_priority is not None:
            cls.__strict_priority__ = strict_priority
        return cls


class Event(Struct, frozen=True, metaclass=EventMeta):
    """Something that happened. Subclass Event; the fields are the payload.

    Rows store the simple name of the class, or ``type_name``. After renaming a class, list the old names in
    ``aliases``, so that old rows can still be decoded. With ``strict_priority=True`` a handler of the event starts only
    after every handler with a lower ``priority`` has finished its first attempt at the same event, successful or not;
    subclasses inherit the option.

    ``json_style="ekbatan"`` encodes and decodes the payload like Ekbatan: camelCase keys, decimals as numbers, enums by
    name, and ``modelId`` and ``modelName`` first. These are the ``model_id`` and ``model_type`` of ``emit``, unless the
    class has fields ``model_id`` and ``model_name``. Subclasses inherit the option. See
    docs/how-to/move-from-another-outbox.md.

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
    __json_style__: ClassVar[str | None] = None


def is_event_class(cls: object) -> bool:
    """Return True for a subclass of :class:`Event` and for a class decorated with ``event``.

    A subclass of a decorated class must be decorated, too, because it needs its own name.
    """
    return isinstance(cls, type) and "__event_version__" in cls.__dict__


def type_name(cls: type[AnyEvent]) -> str:
    """Return the name under which events of this class are stored."""
    return _names(cls).__type_name__


def type_names(cls: type[Any]) -> frozenset[str]:
    """Return all names under which rows of this class may be stored: the type name and the aliases."""
    return _names(cls).__type_aliases__ | {_names(cls).__type_name__}


def is_strict(cls: type[AnyEvent]) -> bool:
    """True if the handlers of this event have strict priority."""
    return bool(getattr(cls, "__strict_priority__", False))


def version_of(cls: type[AnyEvent]) -> int:
    """Return the version of new events of this class."""
    version: int = vars(cls)["__event_version__"]
    return version


def upcasters_of(cls: type[AnyEvent]) -> dict[int, Upcast]:
    """Return the functions that convert a version of this class to the next version."""
    upcasters: dict[int, Upcast] = vars(cls)["__event_upcasters__"]
    return upcasters


def _names(cls: Any) -> type[Event]:
    return cast("type[Event]", cls)


def with_subclasses(cls: type[AnyEvent]) -> Iterator[type[AnyEvent]]:
    """Yield the event classes among the class and all its subclasses defined so far."""
    if is_event_class(cls):
        yield cls
    for subclass in cls.__subclasses__():
        yield from with_subclasses(subclass)


class EventTypes:
    """The event classes of an outbox by type name. Two classes with the same name are refused."""

    def __init__(self) -> None:
        self._classes: dict[str, type[AnyEvent]] = {}
        self._known: set[type[AnyEvent]] = set()
        self._stored_names: set[str] = set()

    def register(self, cls: type[AnyEvent]) -> str:
        """Add a class, and return its type name. Raises :class:`AmbiguousTypeName` if another class has the name."""
        if cls not in self._known:
            for name in type_names(cls):
                other = self._classes.get(name)
                if other is not None and other is not cls:
                    raise AmbiguousTypeName(name, other, cls)
            self._classes.update(dict.fromkeys(type_names(cls), cls))
            self._known.add(cls)
        return type_name(cls)

    def add_stored_names(self, names: Iterable[str]) -> None:
        """Add the names of event types that this process uses without a class."""
        self._stored_names.update(names)

    def uses(self, name: str) -> bool:
        """Return True if this process uses the event type: by a class, a subclass, or a stored name.

        All other names come from outside, and their number is unbounded.
        """
        return (
            name in self._classes
            or name in self._stored_names
            or any(name in type_names(one) for cls in self._known for one in with_subclasses(cls))
        )

    def find(self, name: str) -> type[AnyEvent] | None:
        """Return the class that was registered under this name or alias."""
        return self._classes.get(name)

    @property
    def names(self) -> Set[str]:
        """All names and aliases of the classes."""
        return self._classes.keys()

    def __iter__(self) -> Iterator[type[AnyEvent]]:
        return iter(self._known)


class ActionRecord(Struct, frozen=True, kw_only=True):
    """The columns of ``events`` that all rows of an action share: the action, and the cause."""

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

    def headers_of(self, event: EventRecord) -> str | None:
        """Return the headers of an event's row."""
        return self.headers if event.headers is None else with_own(self.headers, event.headers)

    def completed(self, at: datetime) -> ActionRecord:
        """Return the same action, completed at this time."""
        return replace(self, completion_date=at)


class EventRecord(Struct, frozen=True, kw_only=True):
    """The columns of ``events`` that belong to a single event. A sentinel event has only an id."""

    id: UUID
    event_type: str | None = None
    payload: str | None = None
    model_id: str | None = None
    model_type: str | None = None
    ordering_key: str | None = None
    topic: str | None = None
    available_at: datetime | None = None
    headers: str | None = None
    """Headers of this event in addition to those of the action: the version, if it is not 1."""


ReceivedEvent = tuple[ActionRecord, EventRecord]
"""The event of an inbox message, with the action that receives the message."""


# --- texts that the database cannot store ---------------------------------------------------------

_DOCUMENTS = {"payload": "", "action_params": "params", "headers": "headers"}
"""The columns with JSON, and the names of their values in errors."""


def refusal_of(records: Iterable[Struct], encoding: TextEncoding) -> InvalidEvent | None:
    """Return the error that names the first field that the encoding cannot represent; ``None`` without such a field."""
    for record in records:
        for path, text in _texts_of(record):
            if (reason := encoding.why_refused(text)) is not None:
                logged = f"{path} has a character that the encoding {encoding.name} lacks"
                return InvalidEvent(_subject_of(record), f"{path} {reason}", logged=logged)
    return None


def _texts_of(record: Struct) -> Iterator[tuple[str, str]]:
    for column in record.__struct_fields__:
        value = getattr(record, column)
        if not isinstance(value, str) or value.isascii():
            continue
        if column not in _DOCUMENTS:
            yield column, value
            continue
        for path, leaf in leaves_of(msgspec.json.decode(value)):
            if isinstance(leaf, str):
                yield f"{_DOCUMENTS[column]}{path}".strip(". "), leaf


def _subject_of(record: Any) -> str:
    match record:
        case EventRecord():
            return f"event {record.event_type}"
        case ActionRecord():
            return f"action {record.action_name}"
        case _:  # the row of an inbox message
            return f"message {record.external_id!r} from {record.source!r}"
