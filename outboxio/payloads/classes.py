"""The kinds of classes that events may have, and the codec of a class.

msgspec encodes and decodes structs, dataclasses and attrs classes. Pydantic does so for its own classes
(``models.py``). The codec is chosen once for each class, so that an event costs no search for the right codec.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from outboxio.payloads.ekbatan import EkbatanCodec, has_style
from outboxio.payloads.init_vars import decoder_without_init_vars
from outboxio.payloads.models import ModelCodec, is_model
from outboxio.support.codec import Check, encode_object


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
"""The event of a JSON text: a ``str``, ``bytes`` or ``msgspec.Raw``. The ``msgspec.ValidationError`` for a value that
does not fit names the field."""


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
