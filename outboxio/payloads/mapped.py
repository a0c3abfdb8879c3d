"""The id and the type of a mapped object of SQLAlchemy, for ``emit(event, model=order)``."""

from __future__ import annotations

from typing import Any

from outboxio.errors import InvalidEvent
from outboxio.support.text import briefly


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
