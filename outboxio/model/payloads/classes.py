"""The kinds of classes that events may have, and the codec of a class.

msgspec encodes and decodes structs, dataclasses and attrs classes. Pydantic does so for its own classes
(``models.py``). The codec is selected once for each class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import contains
from typing import Any, ClassVar, Protocol, cast

import msgspec

from outboxio.errors import InvalidEvent
from outboxio.model.payloads.fields import decoder_without_init_vars
from outboxio.model.payloads.models import EkbatanCodec, ModelCodec, has_style, is_model
from outboxio.support.codec import Check, decode_object, encode_object
from outboxio.support.log import is_pydantic_error, problems_in, type_name
from outboxio.support.text import briefly


class _DataclassLike(Protocol):
    """For type checkers: dataclasses, and on pyright all classes with ``dataclass_transform``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class _StructLike(Protocol):
    __struct_fields__: ClassVar[tuple[str, ...]]


class _ModelLike(Protocol):
    __pydantic_fields__: ClassVar[dict[str, Any]]


class _AttrsLike(Protocol):
    __attrs_attrs__: ClassVar[Any]


AnyEvent = _DataclassLike | _StructLike | _ModelLike | _AttrsLike
"""For annotations: an event of any supported kind of class. Type checkers reject other values, such as a ``str``."""

KINDS = "a msgspec Struct, a Pydantic model, a dataclass or an attrs class"


def is_supported(cls: type) -> bool:
    """True if outboxio can store objects of this class."""
    marks = ("__struct_fields__", "__pydantic_validator__", "__dataclass_fields__", "__attrs_attrs__")
    return any(hasattr(cls, mark) for mark in marks)


Encoder = Callable[..., str]
"""``encode(event, subject, stores_nul=..., check=...)``, as :func:`~outboxio.support.codec.encode_object`."""
Decoder = Callable[[Any], Any]
"""Decodes an event from JSON: a ``str``, ``bytes`` or ``msgspec.Raw``. For a value that does not fit, raises an error
that names the field: ``msgspec.ValidationError``, or ``pydantic.ValidationError`` for a Pydantic class."""


@lru_cache(maxsize=1000)
def encoder_of(cls: type) -> Encoder:
    """Return the encoder of a class."""
    if has_style(cls):
        return EkbatanCodec(cls).encode
    return ModelCodec(cls).encode if is_model(cls) else encode_object


def decoder_of(cls: type) -> Decoder:
    """Return the decoder of a class. Raises :class:`NameError` if the type of a field cannot be resolved."""
    if has_style(cls):
        return EkbatanCodec(cls).decode
    return ModelCodec(cls).decode if is_model(cls) else decoder_without_init_vars(cls)


def encode_any(value: object, subject: str, *, stores_nul: bool, check: Check | None = None) -> str:
    """Encode an object of any class as a JSON object, for example the parameters of an action."""
    cls: Any = type(value)
    encoded: str = encoder_of(cls)(value, subject, stores_nul=stores_nul, check=check)
    return encoded


# --- the id and the type of a mapped object -------------------------------------------------------
#
# The id and the type of an object that SQLAlchemy maps, for ``emit(event, model=order)``.


def named_by(model: object, model_id: object, model_type: str | None) -> tuple[object, str | None]:
    """Return the ``model_id`` and ``model_type`` of a mapped object. Values that the caller passes take precedence.

    The id is the primary key, and the type is the name of the class. The columns of a composite primary key are joined
    with commas, as in ``"eu,7"``. Raises :class:`InvalidEvent` for an object that is not mapped, and for an object
    without a primary key yet.
    """
    return (_key_of(model) if model_id is None else model_id), model_type or type(model).__name__


def _key_of(model: object) -> object:
    state = _state_of(model)
    key: Any = state.identity
    if key is None:
        key = state.mapper.primary_key_from_instance(model)
    if None in key:
        raise InvalidEvent(
            "model of emit",
            f"a {type(model).__name__} has no primary key yet: await tx.session.flush() before emit, or pass model_id",
        )
    return key[0] if len(key) == 1 else ",".join(map(str, key))


def _state_of(model: object) -> Any:
    state = getattr(model, "_sa_instance_state", None)  # like sqlalchemy.inspect, but five times as fast
    if not hasattr(state, "mapper") or isinstance(model, type):
        reason = "is not an object of a class mapped by SQLAlchemy; pass model_id and model_type"
        raise InvalidEvent("model of emit", f"{briefly(model)} {reason}", logged=f"a {type(model).__name__} {reason}")
    return state


# --- versions of events ---------------------------------------------------------------------------
#
# Versions of events: which version a row has, and how a payload of an older version is read.
#
# The version of a row is a key of its ``headers``. A row without the key has version 1, so events of version 1 are
# stored as before. Upcasters convert a payload to the next version; they take and return the JSON object.


VERSION_HEADER = "outboxio-event-version"
LARGEST_VERSION = 100_000


class NewerVersion(InvalidEvent):
    """The row has a newer version than the event class."""


Upcast = Callable[[dict[str, Any]], dict[str, Any]]

_search = re.compile(VERSION_HEADER.encode()).search  # without a copy of the text; ``in`` takes three times as long


def header_of(version: int) -> str | None:
    """Return the headers that record this version in a row: a JSON object, or ``None`` for version 1."""
    return None if version == 1 else f'{{"{VERSION_HEADER}":{version}}}'


def with_own(shared: str | None, own: str | None) -> str | None:
    """Merge the headers of the action, a JSON object that is not empty, with the row's own headers."""
    if own is None or shared is None:
        return shared or own
    return f"{shared[:-1]},{own[1:]}"


def refuse_reserved(headers: Mapping[str, Any], subject: str) -> None:
    """Raise :class:`InvalidEvent` if user-supplied headers contain the key that holds the version."""
    if VERSION_HEADER in headers:
        reason = f"the key {VERSION_HEADER!r} is reserved for the version of the event's class; remove the key"
        raise InvalidEvent(subject, reason)


def is_marked(raw_context: Any) -> bool:
    """Return False if the text of a row's context certainly has no version, as in nearly all rows."""
    return VERSION_HEADER in raw_context if isinstance(raw_context, str) else _search(raw_context) is not None


def any_marked(raw_contexts: Sequence[Any]) -> bool:
    """Return False if :func:`is_marked` is False for all of these, without a Python call for each."""
    kinds = set(map(type, raw_contexts))
    if kinds <= {str}:
        return any(map(contains, raw_contexts, repeat(VERSION_HEADER)))
    return not kinds <= {bytes, msgspec.Raw} or any(map(_search, raw_contexts))


def version_in(headers: msgspec.Raw) -> int:
    """Return the version in the headers of a row. Raises :class:`InvalidEvent` if it is invalid."""
    return checked_version(decode_object(headers).get(VERSION_HEADER, 1), f"header {VERSION_HEADER!r} of a row")


def checked_version(version: Any, subject: str) -> int:
    """Return ``version``. Raises :class:`InvalidEvent`, naming ``subject``, if it is invalid."""
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= LARGEST_VERSION:
        raise InvalidEvent(subject, f"it is {briefly(version)}; expected a whole number from 1 to {LARGEST_VERSION}")
    return version


def missing_step(version: int, upcasters: Mapping[int, Upcast]) -> int | None:
    """Return the first version for which an upcaster is missing; ``None`` without a gap."""
    return next((step for step in range(min(upcasters, default=version), version) if step not in upcasters), None)


def upcasting(
    name: str, decode: Callable[[Any], Any], stored: int, version: int, upcasters: Mapping[int, Upcast]
) -> Callable[[Any], Any]:
    """Return a decoder that converts rows of version ``stored`` to a class of version ``version``."""
    if stored == version:
        return decode
    subject = f"event {name} of version {stored}"
    if stored > version:
        raise NewerVersion(
            subject, f"the class in this process has version {version}; deploy the code of version {stored}"
        )
    missing = next((step for step in range(stored, version) if step not in upcasters), None)
    if missing is not None:
        raise InvalidEvent(
            subject, f"there is no upcaster from version {missing}; write one with from_version={missing}"
        )

    def decode_older(payload: Any) -> Any:
        document = msgspec.json.decode(payload)
        for step in range(stored, version):
            document = _upcast_once(upcasters[step], document, step, subject)
        try:
            return decode(msgspec.json.encode(document))
        except (msgspec.ValidationError, ValueError) as error:  # Pydantic's is a ValueError
            text = problems_in(error, with_texts=True) if is_pydantic_error(error) else error
            reason = f"the upcasters did not produce a valid event of version {version}: {text}"
            raise InvalidEvent(
                subject, reason, logged="the upcasters did not produce a valid event of the current version"
            ) from error

    return decode_older


def _upcast_once(upcast: Upcast, document: dict[str, Any], step: int, subject: str) -> dict[str, Any]:
    who = f"the upcaster {getattr(upcast, '__qualname__', '')!r} from version {step}"
    try:
        made: Any = upcast(document)
    except Exception as error:
        reason = f"{who} raised {type_name(error)}"
        raise InvalidEvent(subject, f"{reason}: {error}", logged=reason) from error
    if not isinstance(made, dict):
        raise InvalidEvent(subject, f"{who} returned a {type(made).__name__}, not a dict: return the converted dict")
    return cast("dict[str, Any]", made)
