"""The kinds of classes that events may have, and the codec of a class.

msgspec encodes and decodes structs, dataclasses and attrs classes. Pydantic does so for its own classes
(``models.py``). The codec is chosen once for each class, so that an event costs no search for the right codec.
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
    """For type checkers: dataclasses, and on pyright all classes of which ``dataclass_transform`` tells."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class _StructLike(Protocol):
    __struct_fields__: ClassVar[tuple[str, ...]]


class _ModelLike(Protocol):
    __pydantic_fields__: ClassVar[dict[str, Any]]


class _AttrsLike(Protocol):
    __attrs_attrs__: ClassVar[Any]


AnyEvent = _DataclassLike | _StructLike | _ModelLike | _AttrsLike
"""For annotations: an event of any kind of class. A type checker refuses all other values, such as a ``str``."""

KINDS = "a msgspec Struct, a Pydantic model, a dataclass or an attrs class"


def is_supported(cls: type) -> bool:
    """True for a class of which outboxio can store objects."""
    marks = ("__struct_fields__", "__pydantic_validator__", "__dataclass_fields__", "__attrs_attrs__")
    return any(hasattr(cls, mark) for mark in marks)


Encoder = Callable[..., str]
"""``encode(event, subject, stores_nul=..., check=...)``, as :func:`~outboxio.support.codec.encode_object`."""
Decoder = Callable[[Any], Any]
"""The event of a JSON text: a ``str``, ``bytes`` or ``msgspec.Raw``. The ``msgspec.ValidationError``, or
for a class of Pydantic ``pydantic.ValidationError``, for a value that does not fit names the field."""


@lru_cache(maxsize=1000)
def encoder_of(cls: type) -> Encoder:
    """The encoder of a class."""
    if has_style(cls):
        return EkbatanCodec(cls).encode
    return ModelCodec(cls).encode if is_model(cls) else encode_object


def decoder_of(cls: type) -> Decoder:
    """The decoder of a class. Raises :class:`NameError` if the type of a field cannot be found."""
    if has_style(cls):
        return EkbatanCodec(cls).decode
    return ModelCodec(cls).decode if is_model(cls) else decoder_without_init_vars(cls)


def encode_any(value: object, subject: str, *, stores_nul: bool, check: Check | None = None) -> str:
    """The JSON object of a value of any class, such as the parameters of an action."""
    cls: Any = type(value)
    encoded: str = encoder_of(cls)(value, subject, stores_nul=stores_nul, check=check)
    return encoded


# --- the id and the type of a mapped object of SQLAlchemy -----------------------------------------
#
# The id and the type of a mapped object of SQLAlchemy, for ``emit(event, model=order)``.


def named_by(model: object, model_id: object, model_type: str | None) -> tuple[object, str | None]:
    """The ``model_id`` and ``model_type`` of a mapped object. A given value goes before the value of the object.

    The id is the primary key, and the type is the name of the class. A primary key of several columns is joined by
    commas, as in ``"eu,7"``. Raises :class:`InvalidEvent` for an object that is not mapped, and for an object
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
            f"a {type(model).__name__} has no primary key yet: await tx.session.flush() before emit, or give model_id",
        )
    return key[0] if len(key) == 1 else ",".join(map(str, key))


def _state_of(model: object) -> Any:
    state = getattr(model, "_sa_instance_state", None)  # as sqlalchemy.inspect, in a fifth of the time
    if not hasattr(state, "mapper") or isinstance(model, type):
        remedy = "is no object of a class that SQLAlchemy has mapped; give model_id and model_type"
        raise InvalidEvent("model of emit", f"{briefly(model)} {remedy}", logged=f"a {type(model).__name__} {remedy}")
    return state


# --- versions of events ---------------------------------------------------------------------------
#
# Versions of events: which version a row has, and how a payload of an older version is read.
#
# The version of a row is a key of its ``headers``. A row without the key has version 1, so events of version 1 are
# stored as before. The functions that lead from one version to the next (upcasters) get and return the JSON object.


VERSION_HEADER = "outboxio-event-version"
LARGEST_VERSION = 100_000


class NewerVersion(InvalidEvent):
    """A row has a version that the code here does not know."""


Upcast = Callable[[dict[str, Any]], dict[str, Any]]

_search = re.compile(VERSION_HEADER.encode()).search  # without a copy of the text; ``in`` takes three times as long


def header_of(version: int) -> str | None:
    """The own headers of a row of this version: a JSON object, or ``None`` for version 1."""
    return None if version == 1 else f'{{"{VERSION_HEADER}":{version}}}'


def with_own(shared: str | None, own: str | None) -> str | None:
    """The headers of a row: the headers of the action, which are an object with keys, and the row's own."""
    if own is None or shared is None:
        return shared or own
    return f"{shared[:-1]},{own[1:]}"


def refuse_reserved(headers: Mapping[str, Any], subject: str) -> None:
    """Raise :class:`InvalidEvent` if an application gives the key that holds the version."""
    if VERSION_HEADER in headers:
        reason = f"the key {VERSION_HEADER!r} is reserved for the version of the event's class; leave the key out"
        raise InvalidEvent(subject, reason)


def is_marked(raw_context: Any) -> bool:
    """False if the text of a row's context surely holds no version. Nearly all rows are told apart in this way."""
    return VERSION_HEADER in raw_context if isinstance(raw_context, str) else _search(raw_context) is not None


def any_marked(raw_contexts: Sequence[Any]) -> bool:
    """False if :func:`is_marked` is False for all of these: without a call in Python for each."""
    kinds = set(map(type, raw_contexts))
    if kinds <= {str}:
        return any(map(contains, raw_contexts, repeat(VERSION_HEADER)))
    return not kinds <= {bytes, msgspec.Raw} or any(map(_search, raw_contexts))


def version_in(headers: msgspec.Raw) -> int:
    """The version in the headers of a row. Raises :class:`InvalidEvent` for a value that is no version."""
    return checked_version(decode_object(headers).get(VERSION_HEADER, 1), f"header {VERSION_HEADER!r} of a row")


def checked_version(version: Any, subject: str) -> int:
    """``version``; :class:`InvalidEvent`, naming ``subject``, for a value that is no version."""
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= LARGEST_VERSION:
        raise InvalidEvent(subject, f"it is {briefly(version)}, and no whole number from 1 to {LARGEST_VERSION}")
    return version


def missing_step(version: int, upcasters: Mapping[int, Upcast]) -> int | None:
    """The first version that no upcaster leads on from, although an upcaster leads to it; ``None`` without a gap."""
    return next((step for step in range(min(upcasters, default=version), version) if step not in upcasters), None)


def upcasting(
    name: str, decode: Callable[[Any], Any], stored: int, version: int, upcasters: Mapping[int, Upcast]
) -> Callable[[Any], Any]:
    """The decoder of rows of the version ``stored``, for a class of the version ``version``."""
    if stored == version:
        return decode
    subject = f"event {name} of version {stored}"
    if stored > version:
        raise NewerVersion(subject, f"the class here has version {version}; deploy the code of version {stored}")
    missing = next((step for step in range(stored, version) if step not in upcasters), None)
    if missing is not None:
        raise InvalidEvent(
            subject, f"no upcaster leads on from version {missing}; write one with from_version={missing}"
        )

    def decode_older(payload: Any) -> Any:
        document = msgspec.json.decode(payload)
        for step in range(stored, version):
            document = _one_on(upcasters[step], document, step, subject)
        try:
            return decode(msgspec.json.encode(document))
        except (msgspec.ValidationError, ValueError) as error:  # of Pydantic is a ValueError
            text = problems_in(error, with_texts=True) if is_pydantic_error(error) else error
            told = f"the upcasters have made no event of version {version}: {text}"
            raise InvalidEvent(
                subject, told, logged="the upcasters have made no event of the present version"
            ) from error

    return decode_older


def _one_on(upcast: Upcast, document: dict[str, Any], step: int, subject: str) -> dict[str, Any]:
    who = f"the upcaster {getattr(upcast, '__qualname__', '')!r} from version {step}"
    try:
        made: Any = upcast(document)
    except Exception as error:
        told = f"{who} raised {type_name(error)}"
        raise InvalidEvent(subject, f"{told}: {error}", logged=told) from error
    if not isinstance(made, dict):
        raise InvalidEvent(subject, f"{who} returned a {type(made).__name__}, and no dict: return the changed dict")
    return cast("dict[str, Any]", made)
