"""Refusing a handler function whose signature or annotation contradicts the registration.

A handler is called with an envelope, or with ``batch=`` with a list of envelopes. A function is refused only if it is
certain that calls will fail. Annotations do not count if

* the annotation cannot be resolved here: imports for type checkers, local classes;
* the function is decorated, because a decorator may call the function with different arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from msgspec import Struct

from outboxio.errors import RegistrationError
from outboxio.model.envelope import EventEnvelope
from outboxio.model.event import is_event_class
from outboxio.payloads.classes import AnyEvent
from outboxio.support.signature import POSITIONAL, missing_for, signature_of

_UNKNOWN: Any = inspect.Parameter.empty


class CallCheck(Struct, frozen=True, kw_only=True):
    """A handler's function, and the argument of its calls."""

    function: Callable[..., Any]
    name: str
    where: str
    event_types: Sequence[type[AnyEvent]]
    is_batch: bool

    def refuse(self) -> None:
        """Raise :class:`RegistrationError` if no call can succeed, or if the annotation is for a different argument."""
        self._refuse_uncallable()
        forms = list(_members(_annotation_of_first(self.function)))
        if self.is_batch:
            self._refuse_single(forms)
            forms = _items(forms)
        else:
            self._refuse_list(forms)
        self._refuse_bare_event(forms)
        self._refuse_other_events(forms)

    def _refuse_uncallable(self) -> None:
        missing = missing_for(self.function, 1)
        if missing is not None:
            what = "a list of envelopes" if self.is_batch else "one envelope"
            raise RegistrationError(
                f"handler {self.name!r} is called with {what}, and {self.where} {missing}; give every other parameter "
                "a default, bind it with functools.partial, or write the handler as an EventHandler class that takes "
                "it in __init__"
            )

    def _refuse_single(self, forms: Sequence[Any]) -> None:
        if all(map(_is_envelope, forms)):
            self._contradicts(forms[0], f"batch= makes each call with a list: annotate list[{_shown(forms[0])}]")

    def _refuse_list(self, forms: Sequence[Any]) -> None:
        if all(map(_is_list, forms)):
            self._contradicts(
                forms[0], "each call is made with one envelope: add batch=Batch(...), or annotate EventEnvelope[...]"
            )

    def _refuse_bare_event(self, forms: Sequence[Any]) -> None:
        if forms and all(map(_is_event, forms)):
            self._contradicts(
                forms[0], f"a call is made with envelopes: annotate EventEnvelope[{_shown(forms[0])}], and find the "
                "event in envelope.event"
            )  # fmt: skip

    def _refuse_other_events(self, forms: Sequence[Any]) -> None:
        """Refuse an event type that is no annotated class, and no base class or subclass of an annotated class."""
        annotated = [cls for form in forms for argument in get_args(form) for cls in _members(argument)]
        if not (forms and all(map(_is_envelope, forms)) and annotated and all(map(_is_event, annotated))):
            return  # Any, a dict, a type variable: any event
        event_types: Sequence[type] = self.event_types
        for cls in event_types:
            if not any(issubclass(cls, other) or issubclass(other, cls) for other in annotated):
                raise RegistrationError(
                    f"handler {self.name!r} is for {_shown(cls)}, and {self.where} is annotated to take "
                    f"EventEnvelope[{' | '.join(map(_shown, annotated))}]; name the same event type in both"
                )

    def _contradicts(self, annotation: Any, remedy: str) -> NoReturn:
        raise RegistrationError(
            f"handler {self.name!r}: the first parameter of {self.where} is annotated {_shown(annotation)}; {remedy}"
        )


# --- annotations ---------------------------------------------------------------------------------


def _annotation_of_first(function: Callable[..., Any]) -> Any:
    """The annotation of the first parameter; ``_UNKNOWN`` if there is none, or none that can be trusted."""
    plain = _plain(function)
    signature = None if hasattr(plain, "__wrapped__") else signature_of(function)
    if signature is None:
        return _UNKNOWN
    first = next((p for p in signature.parameters.values() if p.kind in POSITIONAL), None)
    annotation = _UNKNOWN if first is None else first.annotation
    return _resolved(annotation, plain) if isinstance(annotation, str) else annotation


def _plain(function: Any) -> Any:
    """The function inside a method, a partial, or an object with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = type(function).__call__
    return getattr(function, "__func__", function)


def _resolved(annotation: str, function: Any) -> Any:
    """The type of an annotation in quotes, or of ``from __future__ import annotations``."""
    try:
        # typing.get_type_hints would evaluate all annotations, and fail at a name that only type checkers import.
        return eval(annotation, getattr(function, "__globals__", {}), dict(inspect.getclosurevars(function).nonlocals))
    except Exception:
        return _UNKNOWN


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union; for any other annotation, the annotation."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _items(forms: Sequence[Any]) -> list[Any]:
    """The item types of annotations that are all lists; otherwise an empty list."""
    if not all(map(_is_list, forms)):
        return []
    return [item for form in forms for argument in get_args(form) for item in _members(argument)]


def _class_of(annotation: Any) -> type | None:
    cls = get_origin(annotation) or annotation
    return cls if isinstance(cls, type) and cls is not _UNKNOWN else None


def _is_envelope(annotation: Any) -> bool:
    cls = _class_of(annotation)
    return cls is not None and issubclass(cls, EventEnvelope)


def _is_list(annotation: Any) -> bool:
    """True for an annotation that fits a list and no envelope: ``list``, ``Sequence``, ``Iterable``."""
    cls = _class_of(annotation)
    try:
        return cls is not None and issubclass(list, cls) and not issubclass(EventEnvelope, cls)
    except TypeError:  # a protocol that cannot be asked
        return False


def _is_event(annotation: Any) -> bool:
    return is_event_class(annotation)


def _shown(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__qualname__
    origin, arguments = _class_of(annotation), get_args(annotation)
    if origin is None or not arguments:
        return str(annotation)
    told = [" | ".join(map(_shown, _members(argument))) for argument in arguments]
    return f"{origin.__qualname__}[{', '.join(told)}]"
