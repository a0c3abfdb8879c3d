"""Resources by type: the parameters of a handler beside the envelope (decision 34).

The plan of a handler is made once, at registration. So a type that no resource has is refused before the first event,
and a run only calls the factories of the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from typing import Any, NoReturn, cast, get_origin

from msgspec import Struct

from outboxio.errors import RegistrationError
from outboxio.handlers.annotations import UNKNOWN, is_envelope, members, plain, resolved, shown
from outboxio.model.envelope import EventEnvelope
from outboxio.support.signature import POSITIONAL, missing_for, signature_of, where_defined

_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Parameter(Struct, frozen=True):
    """A parameter that a resource can be given for."""

    name: str
    written: Any
    """The annotation as it stands in the code, perhaps in quotes."""
    annotation: Any
    """The type, or ``UNKNOWN``."""

    @property
    def told(self) -> str:
        """The parameter in an error: the name, and the type or the reason why the type is unknown."""
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
    """The way from resources to the arguments of a function."""

    values: Mapping[Hashable, Any]
    """The resources that are given as they are."""
    steps: tuple[Step, ...]
    """The factories, each after the factories whose objects it takes."""
    arguments: Mapping[str, Hashable]

    async def open(self, stack: AsyncExitStack, envelope: EventEnvelope[Any]) -> dict[str, Any]:
        """Make the arguments of a run. ``stack`` closes the resources of the run, the newest first."""
        made = {**self.values, EventEnvelope: envelope}
        for step in self.steps:
            arguments = {name: made[key] for name, key in step.needs.items()}
            made[step.key] = await _entered(step.factory(**arguments), stack)
        return {name: made[key] for name, key in self.arguments.items()}


async def _entered(result: object, stack: AsyncExitStack) -> Any:
    """The object of a factory. An awaitable is awaited, and a context manager is entered."""
    made = result
    if inspect.isawaitable(made) and not isinstance(made, AbstractAsyncContextManager):
        made = await cast("Awaitable[object]", made)
    if isinstance(made, AbstractAsyncContextManager):
        return await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", made))
    if isinstance(made, AbstractContextManager):
        return stack.enter_context(cast("AbstractContextManager[Any]", made))
    return made


class Resources:
    """``Outbox(resources=...)`` by type. Resources that are no mapping, and keys that are strings, have no types."""

    def __init__(self, given: object = None) -> None:
        mapping: Mapping[Hashable, Any] = cast(Any, given) if isinstance(given, Mapping) else {}
        self._by_type: dict[Hashable, Any] = {key: value for key, value in mapping.items() if not isinstance(key, str)}

    def plan(self, function: Callable[..., Any], name: str, called_with: str) -> Plan:
        """The plan for a handler's function; :class:`RegistrationError` for a parameter without a resource."""
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
        """The key for an annotation: the annotation itself, or a member of a union such as ``Mailer | None``."""
        for wanted in (annotation, *members(annotation)):
            try:
                if wanted in self._by_type:
                    return cast(Hashable, wanted)
            except TypeError:  # an annotation without a hash
                continue
        return None

    def __getitem__(self, key: Hashable) -> Any:
        return self._by_type[key]

    @property
    def told(self) -> str:
        return ", ".join(sorted(map(shown, self._by_type)))

    def _refuse_handler(
        self, subject: str, function: Callable[..., Any], missing: str, parameters: Collection[Parameter]
    ) -> NoReturn:
        lacking = [p.told for p in parameters if repr(p.name) in missing]
        because = f" ({'; '.join(lacking)}; resources has {self.told})" if self._by_type and lacking else ""
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
            circle = " -> ".join(map(shown, (*self._path[self._path.index(key) :], key)))
            raise RegistrationError(f"handler {self._handler!r} needs resources that need each other: {circle}")
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
            lacking = [p.told for p in parameters if repr(p.name) in missing]
            raise RegistrationError(
                f"handler {self._handler!r} needs {shown(key)}, and its factory {where_defined(factory)} {missing} "
                f"({'; '.join(lacking)}); a factory may take the envelope and other resources by type: resources has "
                f"{self._resources.told}"
            )
        return needs


def is_factory(key: Hashable, given: object) -> bool:
    """True for a callable that is no instance of the key. Such a callable makes the resource for each run."""
    plain_key = next(members(key))  # without Annotated
    cls = get_origin(plain_key) or getattr(plain_key, "__supertype__", plain_key)
    try:
        return callable(given) and not isinstance(given, cast(type, cls))
    except TypeError:  # a protocol that cannot be asked
        return callable(given)


def _as_context(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory; a generator function becomes a factory of context managers."""
    if inspect.isasyncgenfunction(factory):
        return asynccontextmanager(factory)
    return contextmanager(factory) if inspect.isgeneratorfunction(factory) else factory


def _parameters(function: Callable[..., Any], *, positional: int, unwraps: bool = False) -> Iterator[Parameter]:
    """The parameters after the first ``positional`` that can be given by keyword, and are not given by a partial.

    A wrapper with ``**kwargs`` hands resources on, so the parameters of the wrapped function count as well.
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
