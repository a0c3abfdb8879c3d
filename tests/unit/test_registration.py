"""A handler that would fail in every run is refused at registration, by name, with the fix."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Generic, NewType, Protocol, TypeVar
from uuid import UUID

import msgspec
import pytest

from outboxio import Batch, Event, EventEnvelope, EventHandler, Outbox, RegistrationError, RetryPolicy
from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.handler_object import handler_from_object
from outboxio.handlers.registration import Registration

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]  # there is no such module, which is the point


class Placed(Event):
    order_id: int


class Paid(Event):
    order_id: int


class PaidInCash(Paid):
    pass


T = TypeVar("T", bound=Event)


def register(function: Callable[..., Any], *event_types: type[Event], **options: Any) -> None:
    outbox = Outbox("sqlite://", namespace="app")
    outbox.handler(*(event_types or (Placed,)), name="confirm", **options)(function)


def refusal(function: Callable[..., Any], *event_types: type[Event], **options: Any) -> str:
    with pytest.raises(RegistrationError) as caught:
        register(function, *event_types, **options)
    return str(caught.value)


# --- how it is called ----------------------------------------------------------------------------


async def without() -> None: ...
async def with_mailer(envelope: Any, mailer: Any) -> None: ...
async def with_keyword(envelope: Any, *, mailer: Any) -> None: ...
async def keyword_alone(*, envelope: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without, "takes no positional arguments"),
        (with_mailer, "also requires 'mailer'"),
        (with_keyword, "also requires 'mailer'"),
        (keyword_alone, "takes no positional arguments"),
        (functools.partial(with_mailer, 1, 2), "takes no positional arguments"),
    ],
)
@pytest.mark.parametrize("batch", [None, Batch()])
def test_a_function_that_cannot_be_called_with_one_envelope_is_refused(
    function: Callable[..., Any], reason: str, batch: Batch | None
) -> None:
    message = refusal(function, batch=batch)

    assert reason in message
    assert "handler 'confirm' is called with " + ("a list of envelopes" if batch else "one envelope") in message
    assert "give every other parameter a default" in message


def test_the_error_names_the_function_and_its_module() -> None:
    assert f"{__name__}.with_mailer also requires 'mailer'" in refusal(with_mailer)


class Service:
    async def method(self, envelope: Any) -> None: ...

    @classmethod
    async def of_class(cls, envelope: Any) -> None: ...

    @staticmethod
    async def static(envelope: Any) -> None: ...

    async def __call__(self, envelope: Any) -> None: ...


async def with_default(envelope: Any, mailer: Any = None, *, more: Any = 1, **rest: Any) -> None: ...
async def any_number(*envelopes: Any) -> None: ...
async def positional(envelope: Any, /) -> None: ...
async def batch_of_any(envelopes: list[Any]) -> None: ...


def logged(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> None:
        await function(*args, **kwargs)

    return wrapper


def with_a_mailer(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(function)
    async def wrapper(envelope: Any, **kwargs: Any) -> None:
        await function(envelope, "mailer", **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        with_default, any_number, positional, Service().method, Service.of_class, Service.static, Service(),
        functools.partial(with_mailer, mailer=1), functools.partial(with_keyword, mailer=1), logged(with_default),
        with_a_mailer(with_mailer),
    ],
)  # fmt: skip
def test_anything_callable_with_one_envelope_is_a_handler(function: Callable[..., Any]) -> None:
    register(function)


def test_a_hook_not_callable_with_envelope_and_error_is_refused() -> None:
    async def hook(envelope: Any) -> None: ...

    message = "on_dead of handler 'confirm' is called with (envelope, error), and "
    assert message in refusal(positional, on_dead=hook)
    with pytest.raises(RegistrationError, match=r"on_dead of the outbox is called with .* takes 1 positional argument"):
        Outbox("sqlite://", namespace="app", on_dead=hook)  # type: ignore[arg-type]  # which is the point


@pytest.mark.parametrize("wrap", [lambda backoff: backoff, lambda backoff: RetryPolicy(backoff=backoff)])
def test_a_retry_policy_not_callable_with_attempts_and_error_is_refused(wrap: Callable[..., Any]) -> None:
    message = refusal(positional, retry=wrap(lambda attempts: timedelta(seconds=attempts)))

    assert "is called with (attempts, exception) and takes 1 positional argument" in message
    register(positional, retry=wrap(lambda attempts, error: timedelta(seconds=attempts)))


# --- what it says that it is called with ---------------------------------------------------------


async def paid(envelope: EventEnvelope[Paid]) -> None: ...
async def in_cash(envelope: EventEnvelope[PaidInCash]) -> None: ...
async def paid_list(envelopes: list[EventEnvelope[Paid]]) -> None: ...
async def paid_sequence(envelopes: Sequence[EventEnvelope[Paid]]) -> None: ...
async def paid_or_list(envelopes: EventEnvelope[Paid] | list[EventEnvelope[Paid]]) -> None: ...
async def bare_list(envelopes: list) -> None: ...  # type: ignore[type-arg]  # as in untyped code
async def bare(event: Paid) -> None: ...
async def bare_items(events: list[Paid]) -> None: ...
async def placed_or_paid(envelope: EventEnvelope[Placed | Paid]) -> None: ...
async def either_envelope(envelope: EventEnvelope[Placed] | EventEnvelope[Paid]) -> None: ...
async def base(envelope: EventEnvelope[Event]) -> None: ...
async def anything(envelope: EventEnvelope[Any]) -> None: ...
async def document(envelope: EventEnvelope[dict[str, Any]]) -> None: ...  # type: ignore[type-var]  # of a topic
async def generic(envelope: EventEnvelope[T]) -> None: ...
async def annotated(envelope: Annotated[EventEnvelope[Paid], "the payment"]) -> None: ...
async def unresolved(envelope: EventEnvelope[Unknown]) -> None: ...
async def unresolved_beside(envelope: EventEnvelope[Paid], more: Unknown = None) -> Unknown: ...
async def untyped(envelope) -> None: ...  # type: ignore[no-untyped-def]  # which is the point


class Carries(Protocol):
    @property
    def event_id(self) -> UUID: ...


async def by_protocol(envelope: Carries) -> None: ...


class Handles:
    async def __call__(self, envelope: EventEnvelope[Paid]) -> None: ...

    async def method(self, envelope: EventEnvelope[Paid]) -> None: ...


@pytest.mark.parametrize(
    "function", [paid, annotated, unresolved_beside, Handles(), Handles().method, functools.partial(paid)]
)
def test_an_envelope_of_another_event_is_refused(function: Callable[..., Any]) -> None:
    message = refusal(function, Placed)

    assert "handler 'confirm' is for Placed, and " in message
    assert "is annotated to take EventEnvelope[Paid]; name the same event type in both" in message
    register(function, Paid)


def test_every_event_type_of_a_handler_must_match_the_annotation() -> None:
    assert "is for Placed, and" in refusal(paid, Paid, Placed)
    for function in (placed_or_paid, either_envelope):
        register(function, Paid, Placed)


def test_a_batch_of_envelopes_of_another_event_is_refused() -> None:
    assert "is for Placed, and" in refusal(paid_list, Placed, batch=Batch())


@pytest.mark.parametrize(
    ("function", "event_type"),
    [
        (paid, PaidInCash), (in_cash, Paid), (placed_or_paid, Paid), (base, Paid), (anything, Paid), (document, Paid),
        (generic, Paid), (unresolved, Paid), (untyped, Paid), (by_protocol, Paid), (paid_or_list, Paid),
        (with_a_mailer(paid), Placed),
    ],
)  # fmt: skip
def test_an_annotation_that_may_be_right_is_accepted(function: Callable[..., Any], event_type: type[Event]) -> None:
    register(function, event_type)


def test_a_local_class_in_an_annotation_is_accepted() -> None:
    class Local(Event):
        pass

    async def local(envelope: EventEnvelope[Local]) -> None: ...

    register(local, Local)


@pytest.mark.parametrize("function", [anything, document, untyped, paid])
def test_a_topic_handler_may_take_any_event(function: Callable[..., Any]) -> None:
    outbox = Outbox("sqlite://", namespace="app")
    outbox.handler(name="audit", topic="money")(function)


@pytest.mark.parametrize("function", [paid, annotated])
def test_a_batch_handler_that_takes_one_envelope_is_refused(function: Callable[..., Any]) -> None:
    message = refusal(function, Paid, batch=Batch())

    assert "is annotated EventEnvelope[Paid]; with batch=, each call receives a list" in message
    assert "annotate list[EventEnvelope[Paid]]" in message


@pytest.mark.parametrize(
    ("function", "shown"), [(paid_list, "list[EventEnvelope[Paid]]"), (paid_sequence, "Sequence["), (bare_list, "list")]
)
def test_a_handler_that_takes_a_list_without_batch_is_refused(function: Callable[..., Any], shown: str) -> None:
    message = refusal(function, Paid)

    assert f"the first parameter of {__name__}.{function.__name__} is annotated {shown}" in message
    assert "add batch=Batch(...)" in message
    register(function, Paid, batch=Batch())


def test_a_handler_that_takes_the_bare_event_is_refused() -> None:
    for function, options in ((bare, {}), (bare_items, {"batch": Batch()})):
        message = refusal(function, Paid, **options)
        assert "annotate EventEnvelope[Paid], and use envelope.event" in message


# --- the class form ------------------------------------------------------------------------------


class Confirm(EventHandler[Placed]):
    name = "confirm"

    async def handle(self, envelope: EventEnvelope[Placed]) -> None: ...


def refused(**attributes: Any) -> str:
    with pytest.raises(RegistrationError) as caught:
        handler_from_object(type("Slip", (Confirm,), attributes)())
    return str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "meant"),
    [
        ("retyr", "retry"), ("timout", "timeout"), ("time_out", "timeout"), ("concurency", "concurrency"),
        ("concurrent", "concurrency"), ("delivry", "delivery"), ("orderd", "ordered"), ("prioritiy", "priority"),
        ("alias", "aliases"), ("event_type", "event_types"), ("topics", "topic"), ("batches", "batch"),
        ("onDead", "on_dead"), ("on_daed", "on_dead"), ("on_dead_keys", "on_dead_key"), ("sinc", "since"),
        ("partition", "partitions"), ("total_concurency", "total_concurrency"),
    ],
)  # fmt: skip
def test_a_misspelt_class_attribute_is_refused(attribute: str, meant: str) -> None:
    message = refused(**{attribute: 3})

    assert f"handler 'confirm' has the attribute {attribute!r}" in message
    assert ".Slip)" in message
    assert f"did you mean {meant!r}?" in message
    assert f"'_{attribute}'" in message


def test_a_misspelt_attribute_of_a_base_class_is_refused_too() -> None:
    class Mixin:
        timeouts = 3

    base = type("Base", (Confirm,), {"retyr": 3})
    with pytest.raises(RegistrationError, match="did you mean 'retry'"):
        handler_from_object(type("Child", (base,), {"name": "child"})())
    with pytest.raises(RegistrationError, match="did you mean 'timeout'"):
        handler_from_object(type("Child", (Mixin, Confirm), {"name": "child"})())


def test_a_misspelt_method_is_refused() -> None:
    async def hook(self: Any, envelope: Any, error: Any) -> None: ...

    assert "did you mean 'on_dead'?" in refused(on_daed=hook)
    assert "did you mean 'on_dead'?" in refused(onDead=hook)
    with pytest.raises(RegistrationError, match="did you mean 'handle'"):
        handler_from_object(type("Slip", (EventHandler,), {"name": "slip", "event_types": (Placed,), "handel": hook})())


class Honest(EventHandler[Placed]):
    """A class with every attribute that an application may define."""

    name = "honest"
    mailer: Any
    delay = 5
    reply = "yes"
    game = "chess"
    entry = 1
    retries_of_mailer = 3
    queue = "mail"
    TIMEOUT = 3
    RETRY = 2
    _topics = ("a",)
    template, subject, sender = "confirm.html", "Thanks", "shop@example.com"

    class Meta:
        ordering = ("id",)

    def __init__(self, topics: Sequence[str] = ()) -> None:
        self.topics = topics

    @property
    def timeouts(self) -> int:
        return 1

    @staticmethod
    def deliver() -> None: ...

    @classmethod
    def batches(cls) -> None: ...

    async def on_read(self, envelope: Any) -> None: ...

    async def handle(self, envelope: EventEnvelope[Placed]) -> None: ...


def test_a_class_may_have_its_own_constants_and_methods() -> None:
    assert handler_from_object(Honest(["a"])).name == "honest"


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"retry": 3}, "retry=3; expected a RetryPolicy"),
        ({"batch": 500}, "batch=500; expected a Batch"),
        ({"ordered": "yes"}, "ordered='yes'; expected True or False"),
        ({"delivery": "twice"}, "delivery='twice'; expected one of 'at_least_once'"),
        ({"event_types": Placed}, "event_types of handler 'confirm' is <class"),
        ({"aliases": 5}, "aliases of handler 'confirm' is 5 ("),
        ({"topic": 5}, "the topic of handler 'confirm': 5 is not a string"),
        ({"since": date(2026, 1, 1)}, "since=datetime.date(2026, 1, 1); expected a datetime"),
        ({"partitions": 65}, "partitions=65; expected 'auto', or a whole number from 1 to 64"),
        ({"partitions": 8, "total_concurrency": 4}, "raise total_concurrency to 8 or more"),
        ({"alert_age": "soon"}, "alert_age='soon'; expected a duration"),
        ({"alert_age": 0}, "alert_age=0; expected a duration longer than zero"),
        ({"alert_age": None}, "alert_age=None; expected a duration"),
        ({"trace": None}, "trace=None; expected True or False"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(attributes: dict[str, Any], message: str) -> None:
    assert message in refused(**attributes)


def test_a_handle_method_for_other_events_is_refused() -> None:
    class Other(EventHandler[Placed]):
        name = "other"

        async def handle(self, envelope: EventEnvelope[Paid]) -> None: ...

    with pytest.raises(
        RegistrationError, match=r"is for Placed, and .*Other is annotated to take EventEnvelope\[Paid\]"
    ):
        handler_from_object(Other())


# --- partitions ----------------------------------------------------------------------------------


class Registered(Registration):
    @property
    def registered(self) -> HandlerRegistry:
        return self._handlers

    def _refuse_while_running(self) -> None: ...


def test_a_function_a_class_and_a_batch_may_have_partitions() -> None:
    registration = Registered()
    registration.handler(Placed, name="plain")(positional)
    registration.handler(Placed, name="function", partitions=64, total_concurrency=64)(positional)
    registration.handler(Placed, name="batch", partitions=2, batch=Batch(size=10))(batch_of_any)
    registration.handler(Placed, name="report", partitions=1, batch=Batch(schedule="0 0 * * *"))(batch_of_any)
    registration.add_handler(type("Shared", (Confirm,), {"name": "class", "partitions": 8, "total_concurrency": 40})())

    options = {handler.name: handler.options for handler in registration.registered}
    assert {name: (one.partitions, one.total_concurrency) for name, one in options.items()} == {
        "plain": ("auto", None),
        "function": (64, 64),
        "batch": (2, None),
        "report": (1, None),
        "class": (8, 40),
    }


# --- since ---------------------------------------------------------------------------------------


def test_since_is_a_time_in_utc_or_now() -> None:
    def since(value: Any) -> Any:
        return handler_from_object(type("Since", (Confirm,), {"since": value})()).options.since

    noon = datetime(2026, 1, 1, 12)
    assert [since(value) for value in (None, "now", noon)] == [None, "now", noon]
    assert since(datetime(2026, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))) == noon
    assert since(noon.replace(tzinfo=UTC)) == noon


@pytest.mark.parametrize("value", ["yesterday", timedelta(days=1), 86400, date(2026, 1, 1), True])
def test_a_relative_or_invalid_since_is_refused(value: Any) -> None:
    message = refusal(positional, since=value)

    assert f"has since={value!r}; expected a datetime" in message
    assert "or 'now'" in message


# --- events whose fields cannot be stored --------------------------------------------------------


class Model:
    """As a Pydantic model looks to msgspec."""


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"


class Cents(int):
    pass


@dataclass
class Line:
    item: str
    price: Model


class Node(msgspec.Struct):
    children: list[Node] = []
    model: Model | None = None


class OfModelType(Event):
    line: Model


class OfModels(Event):
    lines: list[Model]


class OfOptional(Event):
    line: Model | None = None


class OfLines(Event):
    order_id: int
    lines: dict[str, list[Line]]


class OfTree(Event):
    tree: Node


class OfMixed(Event):
    kind: Mixed


class OfTwoTexts(Event):
    id: str | UUID


class OfCents(Event):
    cents: Cents


class OfPairs(Event):
    prices: dict[tuple[int, int], int]


class OfExt(Event):
    raw: msgspec.msgpack.Ext


@pytest.mark.parametrize(
    ("event_type", "reason"),
    [
        (OfModelType, "field 'line' is of type test_registration.Model, which JSON cannot hold"),
        (OfModels, "field 'lines[...]' is of type"),
        (OfOptional, "field 'line' is of type"),
        (OfLines, "field 'lines[...][...].price' is of type"),
        (OfTree, "field 'tree.model' is of type"),
        (OfMixed, "field 'kind': Enums must contain either all str or all int values"),
        (OfTwoTexts, "field 'id': Type unions may not contain more than one str-like type"),
        (OfCents, "field 'cents' is of type test_registration.Cents, which JSON cannot hold; use the built-in type"),
        (OfPairs, "field 'prices' has keys that JSON cannot hold"),
        (OfExt, "field 'raw' is of type msgspec.msgpack.Ext"),
    ],
)
def test_an_event_whose_field_cannot_be_stored_is_refused_by_name(event_type: type[Event], reason: str) -> None:
    expected = reason.replace("test_registration.", f"{__name__}.")
    message = refusal(positional, event_type)

    assert f"for events that cannot be stored and read: {event_type.__name__}, {expected}" in message
    assert "handler 'confirm'" in message
    with pytest.raises(RegistrationError, match=event_type.__name__):
        Outbox("sqlite://", namespace="app").register(event_type)


WalletId = NewType("WalletId", UUID)


class Kind(enum.StrEnum):
    OPEN = "open"


G = TypeVar("G")


class Box(msgspec.Struct, Generic[G]):
    value: G


class Fit(Event):
    id: WalletId
    kind: Kind
    amount: Annotated[Decimal, msgspec.Meta(description="in cents")]
    day: date
    happened: Annotated[datetime, msgspec.Meta(tz=True)]
    wait: timedelta
    tags: frozenset[str]
    counts: dict[int, float]
    by_id: dict[UUID, list[tuple[int, ...]]]
    whatever: Any
    also: object
    some: Iterable[int]
    raw: msgspec.Raw
    data: bytes
    box: Box[int]
    line: list[Box[Decimal]] | None = None


def test_every_type_with_a_json_form_is_accepted() -> None:
    register(positional, Fit)


class NotYet(Event):
    other: Later  # type: ignore[name-defined] # noqa: F821  # a class that is defined after the handler is


def test_a_field_of_an_undefined_class_is_not_checked() -> None:
    register(positional, NotYet)


def test_registration_does_not_follow_wrapped_functions() -> None:
    """A decorator that passes on more arguments than it gets changes the signature, whatever ``inspect`` reports."""
    assert "mailer" in inspect.signature(with_a_mailer(with_mailer)).parameters
    register(with_a_mailer(with_mailer))
