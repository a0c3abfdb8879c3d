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
from outboxio.support.signature import POSITIONAL, signature_of

UNKNOWN: Any = inspect.Parameter.empty


class CallCheck(Struct, frozen=True, kw_only=True):
    """A handler's function, and the argument of its calls."""

    function: Callable[..., Any]
    name: str
    where: str
    event_types: Sequence[type[AnyEvent]]
    is_batch: bool
    is_raw: bool = False

    def refuse(self) -> None:
        """Raise :class:`RegistrationError` if the annotation of the first parameter is for a different argument."""
        forms = list(members(_annotation_of_first(self.function)))
        if self.is_batch:
            self._refuse_single(forms)
            forms = _items(forms)
        else:
            self._refuse_list(forms)
        self._refuse_bare_event(forms)
        if self.is_raw:
            self._refuse_decoded(forms)
        else:
            self._refuse_other_events(forms)

    def _refuse_decoded(self, forms: Sequence[Any]) -> None:
        """Refuse an envelope of an event class for a raw handler."""
        for form in forms:
            if is_envelope(form) and any(_is_event(cls) for part in get_args(form) for cls in members(part)):
                self._contradicts(form, "raw=True decodes nothing: annotate EventEnvelope[bytes], or leave raw= out")

    def _refuse_single(self, forms: Sequence[Any]) -> None:
        if all(map(is_envelope, forms)):
            self._contradicts(forms[0], f"batch= makes each call with a list: annotate list[{shown(forms[0])}]")

    def _refuse_list(self, forms: Sequence[Any]) -> None:
        if all(map(_is_list, forms)):
            self._contradicts(
                forms[0], "each call is made with one envelope: add batch=Batch(...), or annotate EventEnvelope[...]"
            )

    def _refuse_bare_event(self, forms: Sequence[Any]) -> None:
        if forms and all(map(_is_event, forms)):
            self._contradicts(
                forms[0], f"a call is made with envelopes: annotate EventEnvelope[{shown(forms[0])}], and find the "
                "event in envelope.event"
            )  # fmt: skip

    def _refuse_other_events(self, forms: Sequence[Any]) -> None:
        """Refuse an event type that is no annotated class, and no base class or subclass of an annotated class."""
        annotated = [cls for form in forms for argument in get_args(form) for cls in members(argument)]
        if not (forms and all(map(is_envelope, forms)) and annotated and all(map(_is_event, annotated))):
            return  # Any, a dict, a type variable: any event
        event_types: Sequence[type] = self.event_types
        for cls in event_types:
            if not any(issubclass(cls, other) or issubclass(other, cls) for other in annotated):
                raise RegistrationError(
                    f"handler {self.name!r} is for {shown(cls)}, and {self.where} is annotated to take "
                    f"EventEnvelope[{' | '.join(map(shown, annotated))}]; name the same event type in both"
                )

    def _contradicts(self, annotation: Any, remedy: str) -> NoReturn:
        raise RegistrationError(
            f"handler {self.name!r}: the first parameter of {self.where} is annotated {shown(annotation)}; {remedy}"
        )


# --- annotations ---------------------------------------------------------------------------------


def _annotation_of_first(function: Callable[..., Any]) -> Any:
    """The annotation of the first parameter; ``UNKNOWN`` if there is none, or none that can be trusted."""
    inner = plain(function)
    signature = None if hasattr(inner, "__wrapped__") else signature_of(function)
    if signature is None:
        return UNKNOWN
    first = next((p for p in signature.parameters.values() if p.kind in POSITIONAL), None)
    annotation = UNKNOWN if first is None else first.annotation
    return resolved(annotation, inner)


def plain(function: Any) -> Any:
    """The function inside a method, a partial, a class, or an object with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    if inspect.isclass(function):
        return function.__init__
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = type(function).__call__
    return getattr(function, "__func__", function)


def resolved(annotation: Any, function: Any) -> Any:
    """The type of an annotation, also in quotes, or of ``from __future__ import annotations``."""
    if not isinstance(annotation, str):
        return annotation
    try:
        # typing.get_type_hints would evaluate all annotations, and fail at a name that only type checkers import.
        return eval(annotation, getattr(function, "__globals__", {}), dict(inspect.getclosurevars(function).nonlocals))
    except Exception:
        return UNKNOWN


def members(annotation: Any) -> Iterator[Any]:
    """The members of a union; for any other annotation, the annotation."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from members(member)
    else:
        yield annotation


def _items(forms: Sequence[Any]) -> list[Any]:
    """The item types of annotations that are all lists; otherwise an empty list."""
    if not all(map(_is_list, forms)):
        return []
    return [item for form in forms for argument in get_args(form) for item in members(argument)]


def _class_of(annotation: Any) -> type | None:
    cls = get_origin(annotation) or annotation
    return cls if isinstance(cls, type) and cls is not UNKNOWN else None


def is_envelope(annotation: Any) -> bool:
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


def shown(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__qualname__
    origin, arguments = _class_of(annotation), get_args(annotation)
    if origin is None or not arguments:
        return str(annotation)
    told = [" | ".join(map(shown, members(argument))) for argument in arguments]
    return f"{origin.__qualname__}[{', '.join(told)}]"
