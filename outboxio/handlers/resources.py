"""Resources by type: the parameters of a handler besides the envelope (decision 34).

A handler's plan is made once, at registration. So a parameter without a matching resource is refused before the first
event, and a run only calls the factories of the plan.

A handler function whose signature or annotation contradicts the registration is refused.

A handler is called with an envelope, or with ``batch=`` with a list of envelopes. A function is refused only if it is
certain that calls will fail. Annotations do not count if

* the annotation cannot be resolved here: imports for type checkers, local classes;
* the function is decorated, because a decorator may call the function with different arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from types import UnionType
from typing import Annotated, Any, NoReturn, Union, cast, get_args, get_origin

from msgspec import Struct

from outboxio.errors import RegistrationError
from outboxio.model.envelope import EventEnvelope
from outboxio.model.event import is_event_class
from outboxio.model.payloads.classes import AnyEvent
from outboxio.support.signature import POSITIONAL, missing_for, signature_of, where_defined

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Parameter(Struct, frozen=True):
    """A parameter that can receive a resource."""

    name: str
    written: Any
    """The annotation as written in the code, possibly in quotes."""
    annotation: Any
    """The type, or ``UNKNOWN``."""

    @property
    def description(self) -> str:
        """Describe the parameter in an error message: its name, and its type or why the type is unknown."""
        if self.annotation is not UNKNOWN:
            return f"{self.name!r} of type {shown(self.annotation)}"
        if self.written is UNKNOWN:
            return f"{self.name!r} without an annotation"
        return f"{self.name!r} of type {self.written!r}, which cannot be resolved (imported for type checkers only?)"


class Step(Struct, frozen=True):
    """A factory to call for each run, with the keys of its arguments."""

    key: Hashable
    factory: Callable[..., Any]
    needs: Mapping[str, Hashable]


class Plan(Struct, frozen=True):
    """How the arguments of a function are made from resources."""

    values: Mapping[Hashable, Any]
    """The resources that are passed unchanged."""
    steps: tuple[Step, ...]
    """The factories, each after the factories that it depends on."""
    arguments: Mapping[str, Hashable]

    async def open(self, stack: AsyncExitStack, envelope: EventEnvelope[Any]) -> dict[str, Any]:
        """Create the arguments of a run. ``stack`` closes the resources of the run, the newest first."""
        made = {**self.values, EventEnvelope: envelope}
        for step in self.steps:
            arguments = {name: made[key] for name, key in step.needs.items()}
            made[step.key] = await _entered(step.factory(**arguments), stack)
        return {name: made[key] for name, key in self.arguments.items()}


async def _entered(result: object, stack: AsyncExitStack) -> Any:
    """Return the object that a factory made: await an awaitable, and enter a context manager."""
    made = result
    if inspect.isawaitable(made) and not isinstance(made, AbstractAsyncContextManager):
        made = await cast("Awaitable[object]", made)
    if isinstance(made, AbstractAsyncContextManager):
        return await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", made))
    if isinstance(made, AbstractContextManager):
        return stack.enter_context(cast("AbstractContextManager[Any]", made))
    return made


class Resources:
    """``Outbox(resources=...)`` by type. Only mappings whose keys are not strings have types."""

    def __init__(self, given: object = None) -> None:
        mapping: Mapping[Hashable, Any] = cast(Any, given) if isinstance(given, Mapping) else {}
        self._by_type: dict[Hashable, Any] = {key: value for key, value in mapping.items() if not isinstance(key, str)}

    def plan(self, function: Callable[..., Any], name: str, called_with: str) -> Plan:
        """Return the plan for a handler's function; :class:`RegistrationError` for a parameter without a resource."""
        planner = _Planner(self, name)
        parameters = list(_parameters(function, positional=1))
        arguments = {p.name: key for p in parameters if (key := self.key_of(p.annotation)) is not None}
        missing = missing_for(function, 1, arguments)
        if missing is not None:
            self._refuse_handler(f"handler {name!r} is called with {called_with}, and", function, missing, parameters)
        for key in arguments.values():
            planner.add(key)
        return Plan(planner.values, tuple(planner.steps.values()), arguments)

    def key_of(self, annotation: Any) -> Hashable | None:
        """Return the key for an annotation: the annotation itself, or a member of a union such as ``Mailer | None``."""
        for wanted in (annotation, *members(annotation)):
            try:
                if wanted in self._by_type:
                    return cast(Hashable, wanted)
            except TypeError:  # an unhashable annotation
                continue
        return None

    def __getitem__(self, key: Hashable) -> Any:
        return self._by_type[key]

    @property
    def type_names(self) -> str:
        return ", ".join(sorted(map(shown, self._by_type)))

    def _refuse_handler(
        self, subject: str, function: Callable[..., Any], missing: str, parameters: Collection[Parameter]
    ) -> NoReturn:
        lacking = [p.description for p in parameters if repr(p.name) in missing]
        because = f" ({'; '.join(lacking)}; resources has {self.type_names})" if self._by_type and lacking else ""
        raise RegistrationError(
            f"{subject} {where_defined(function)} {missing}{because}; give every other parameter a default, add its "
            "type to Outbox(resources={type: value}), bind it with functools.partial, or write the handler as an "
            "EventHandler class that takes it in __init__"
        )


class _Planner:
    """Collects the values and factories that a handler needs."""

    def __init__(self, resources: Resources, handler_name: str) -> None:
        self.values: dict[Hashable, Any] = {}
        self.steps: dict[Hashable, Step] = {}
        self._resources = resources
        self._handler = handler_name
        self._path: list[Hashable] = []

    def add(self, key: Hashable) -> None:
        """Plan a resource, after the resources that its factory takes."""
        if key in self.values or key in self.steps:
            return
        if key in self._path:
            cycle = " -> ".join(map(shown, (*self._path[self._path.index(key) :], key)))
            raise RegistrationError(f"handler {self._handler!r} needs resources that depend on each other: {cycle}")
        given = self._resources[key]
        if not is_factory(key, given):
            self.values[key] = given
            return
        self._path.append(key)
        needs = self._needs(key, given)
        self._path.pop()
        self.steps[key] = Step(key, _as_context(given), needs)

    def _needs(self, key: Hashable, factory: Callable[..., Any]) -> dict[str, Hashable]:
        parameters, needs = list(_parameters(factory, positional=0, unwraps=True)), dict[str, Hashable]()
        for p in parameters:
            if is_envelope(p.annotation) or (p.written is UNKNOWN and p.name == "envelope"):
                needs[p.name] = EventEnvelope
            elif (needed := self._resources.key_of(p.annotation)) is not None:
                self.add(needed)
                needs[p.name] = needed
        missing = missing_for(factory, 0, needs, unwraps=True)
        if missing is not None:
            lacking = [p.description for p in parameters if repr(p.name) in missing]
            raise RegistrationError(
                f"handler {self._handler!r} needs {shown(key)}, and its factory {where_defined(factory)} {missing} "
                f"({'; '.join(lacking)}); a factory may take the envelope and other resources by type: resources has "
                f"{self._resources.type_names}"
            )
        return needs


def is_factory(key: Hashable, given: object) -> bool:
    """True for a callable that is not an instance of the key: a factory that creates the resource for each run."""
    plain_key = next(members(key))  # without Annotated
    cls = get_origin(plain_key) or getattr(plain_key, "__supertype__", plain_key)
    try:
        return callable(given) and not isinstance(given, cast(type, cls))
    except TypeError:  # a protocol without isinstance
        return callable(given)


def _as_context(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return the factory; a generator function becomes a factory of context managers."""
    if inspect.isasyncgenfunction(factory):
        return asynccontextmanager(factory)
    return contextmanager(factory) if inspect.isgeneratorfunction(factory) else factory


def _parameters(function: Callable[..., Any], *, positional: int, unwraps: bool = False) -> Iterator[Parameter]:
    """Yield the parameters after the first ``positional`` that can be passed by keyword and that no partial binds.

    A wrapper with ``**kwargs`` passes resources on, so the parameters of the wrapped function count as well.
    ``unwraps``: the parameters are those of the wrapped function.
    """
    signature = signature_of(function, unwraps=unwraps)
    if signature is None:
        return
    inner, parameters = plain(function), list(signature.parameters.values())
    yield from _by_keyword(function, inspect.unwrap(inner) if unwraps else inner, parameters, positional)
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and hasattr(inner, "__wrapped__") and not unwraps:
        known = signature.parameters.keys()
        yield from (p for p in _parameters(function, positional=positional, unwraps=True) if p.name not in known)


def _by_keyword(
    function: Callable[..., Any], inner: Any, parameters: list[inspect.Parameter], positional: int
) -> Iterator[Parameter]:
    preset = function.keywords if isinstance(function, partial) else {}
    ahead = [p.name for p in parameters if p.kind in POSITIONAL][:positional]
    for p in parameters:
        if p.kind in _BY_KEYWORD and p.name not in preset and p.name not in ahead:
            yield Parameter(p.name, p.annotation, resolved(p.annotation, inner))


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
        """Raise :class:`RegistrationError` if the first parameter is annotated for a different kind of argument."""
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
                self._contradicts(form, "raw=True decodes nothing: annotate EventEnvelope[bytes], or remove raw=")

    def _refuse_single(self, forms: Sequence[Any]) -> None:
        if all(map(is_envelope, forms)):
            self._contradicts(forms[0], f"with batch=, each call receives a list: annotate list[{shown(forms[0])}]")

    def _refuse_list(self, forms: Sequence[Any]) -> None:
        if all(map(_is_list, forms)):
            self._contradicts(
                forms[0], "each call receives one envelope: add batch=Batch(...), or annotate EventEnvelope[...]"
            )

    def _refuse_bare_event(self, forms: Sequence[Any]) -> None:
        if forms and all(map(_is_event, forms)):
            self._contradicts(
                forms[0], f"calls receive envelopes: annotate EventEnvelope[{shown(forms[0])}], and use "
                "envelope.event"
            )  # fmt: skip

    def _refuse_other_events(self, forms: Sequence[Any]) -> None:
        """Reject an event type that is neither an annotated class nor a base class or subclass of one."""
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

    def _contradicts(self, annotation: Any, fix: str) -> NoReturn:
        raise RegistrationError(
            f"handler {self.name!r}: the first parameter of {self.where} is annotated {shown(annotation)}; {fix}"
        )


# --- annotations ---------------------------------------------------------------------------------


def _annotation_of_first(function: Callable[..., Any]) -> Any:
    """Return the annotation of the first parameter; ``UNKNOWN`` if it has none, or none that can be trusted."""
    inner = plain(function)
    signature = None if hasattr(inner, "__wrapped__") else signature_of(function)
    if signature is None:
        return UNKNOWN
    first = next((p for p in signature.parameters.values() if p.kind in POSITIONAL), None)
    annotation = UNKNOWN if first is None else first.annotation
    return resolved(annotation, inner)


def plain(function: Any) -> Any:
    """Return the function inside a method, a partial, a class, or an object with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    if inspect.isclass(function):
        return function.__init__
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = type(function).__call__
    return getattr(function, "__func__", function)


def resolved(annotation: Any, function: Any) -> Any:
    """Return the type of an annotation, even in quotes or with ``from __future__ import annotations``."""
    if not isinstance(annotation, str):
        return annotation
    try:
        # typing.get_type_hints would evaluate all annotations, and fail on a name that only type checkers import.
        return eval(annotation, getattr(function, "__globals__", {}), dict(inspect.getclosurevars(function).nonlocals))
    except Exception:
        return UNKNOWN


def members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union; for any other annotation, the annotation itself."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from members(member)
    else:
        yield annotation


def _items(forms: Sequence[Any]) -> list[Any]:
    """Return the item types of annotations that are all lists; otherwise an empty list."""
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
    """True for an annotation that accepts a list but not an envelope: ``list``, ``Sequence``, ``Iterable``."""
    cls = _class_of(annotation)
    try:
        return cls is not None and issubclass(list, cls) and not issubclass(EventEnvelope, cls)
    except TypeError:  # a protocol without isinstance
        return False


def _is_event(annotation: Any) -> bool:
    return is_event_class(annotation)


def shown(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__qualname__
    origin, arguments = _class_of(annotation), get_args(annotation)
    if origin is None or not arguments:
        return str(annotation)
    parts = [" | ".join(map(shown, members(argument))) for argument in arguments]
    return f"{origin.__qualname__}[{', '.join(parts)}]"
