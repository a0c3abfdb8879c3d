from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import pytest

from outboxio import (
    AmbiguousTypeName,
    Batch,
    Event,
    EventEnvelope,
    EventHandler,
    Outbox,
    RegistrationError,
    RetryPolicy,
)
from outboxio.handlers.handler import Handler, HandlerRegistry, make_handler
from outboxio.handlers.handler_object import handler_from_object
from outboxio.handlers.options import Subscription
from outboxio.model.event import EventTypes
from outboxio.support.signature import is_async


class Opened(Event):
    pass


class Closed(Event, aliases={"Shut"}):
    pass


class Moved(Event):
    pass


class MovedFar(Moved):
    pass


class Strict(Event, strict_priority=True):
    pass


class StrictToo(Strict):
    pass


async def handle(envelope: EventEnvelope[Any]) -> None:
    pass


@functools.wraps(handle)
def plain_around_async(envelope: EventEnvelope[Any]) -> Any:
    return handle(envelope)


def generates(envelope: EventEnvelope[Any]) -> Iterable[None]:
    yield


async def generates_async(envelope: EventEnvelope[Any]) -> AsyncIterator[None]:
    yield


def make(name: str = "first", *event_types: type[Event], aliases: Iterable[str] = (), **options: Any) -> Handler:
    unset: dict[str, Any] = {
        "topic": None, "function": handle,
    }  # fmt: skip
    chosen = {**unset, **options}
    event_types = chosen.pop("types", event_types)
    types = event_types if event_types or chosen["topic"] else (Opened,)
    return make_handler(name=name, event_types=types, aliases=aliases, where="here", **chosen)


def registry(*handlers: Handler) -> HandlerRegistry:
    made = HandlerRegistry(EventTypes())
    for handler in handlers:
        made.add(handler)
    return made


def refused(*handlers: Handler) -> str:
    with pytest.raises(RegistrationError) as caught:
        registry(*handlers)
    return str(caught.value)


# --- names ---------------------------------------------------------------------------------------


def test_a_handler_is_found_by_its_name_and_by_its_aliases() -> None:
    first, second = make("first", aliases={"old", "older"}), make("second")
    handlers = registry(first, second)

    assert [handlers.find(name) for name in ("first", "old", "older", "second", "third")] == [
        *[first] * 3,
        second,
        None,
    ]
    assert handlers.names == ["first", "old", "older", "second"]
    assert (list(handlers), len(handlers)) == ([first, second], 2)


def test_aliases_are_announced_but_never_subscribed() -> None:
    (subscription,) = registry(make("first", aliases={"old", "older"})).subscriptions()

    assert subscription == Subscription(handler_name="first", event_type="Opened", aliases=("old", "older"))


def test_a_name_in_use_is_refused_and_its_owner_named() -> None:
    message = refused(make("first"), make("first"))

    assert "handler name 'first' is registered twice: by here (handler 'first') and here" in message


def test_an_alias_equal_to_another_name_is_refused() -> None:
    assert "handler alias 'first' is registered twice" in refused(make("first"), make("second", aliases={"first"}))


def test_a_name_equal_to_another_alias_is_refused() -> None:
    assert "handler name 'first' is registered twice" in refused(make("second", aliases={"first"}), make("first"))


def test_an_alias_equal_to_another_alias_is_refused() -> None:
    assert "handler alias 'old' is registered twice" in refused(
        make("first", aliases={"old"}), make("second", aliases={"old"})
    )


def test_a_refused_handler_leaves_no_trace() -> None:
    handlers = registry(make("first"))
    with pytest.raises(RegistrationError):
        handlers.add(make("second", Closed, aliases={"third", "first"}))

    assert handlers.names == ["first"]
    handlers.add(make("third"))


def test_an_event_may_have_several_handlers() -> None:
    handlers = registry(make("first", Opened), make("second", Opened))

    assert [subscription.handler_name for subscription in handlers.subscriptions()] == ["first", "second"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "blank"),
        ({"name": "  "}, "blank"),
        ({"name": "x" * 256}, "has 256 characters; the column holds 255"),
        ({"name": "a\0b"}, "NUL"),
        ({"name": "a\ud800"}, "lone surrogate"),
        ({"name": 7}, "7 is not a string"),
        ({"aliases": {""}}, "an alias of handler 'first': '' is blank"),
        ({"aliases": {"x" * 256}}, "an alias of handler 'first'"),
        ({"aliases": "old"}, "aliases of handler 'first' is one string; pass a set of names: {'old'}"),
        ({"aliases": {"first"}}, "handler 'first' has its own name as an alias"),
        ({"topic": " "}, "the topic of handler 'first': ' ' is blank"),
        ({"topic": "x" * 256}, "the topic of handler 'first'"),
        ({"retry": 3}, "expected a RetryPolicy or a callable of (attempts, exception)"),
        ({"concurrency": 0}, "handler 'first' has concurrency=0; expected 1 or more"),
        ({"concurrency": True}, "handler 'first' has concurrency=True; expected 1 or more"),
        ({"timeout": 0}, "handler 'first' has timeout=0; expected a duration longer than zero"),
        ({"timeout": "soon"}, "handler 'first' has timeout='soon'; expected a duration"),
        ({"delivery": "twice"}, "handler 'first' has delivery='twice'; expected one of 'at_least_once'"),
        ({"on_dead": print}, "on_dead of handler 'first'"),
        ({"ordered": "yes"}, "handler 'first' has ordered='yes'; expected True or False"),
        ({"relay": 1}, "handler 'first' has relay=1; expected True or False"),
        ({"batch": 500}, "handler 'first' has batch=500; expected a Batch, as in batch=Batch(size=500)"),
        ({"priority": 1.5}, "handler 'first' has priority=1.5; expected a whole number from -2147483648 to 2147483647"),
        ({"priority": 2**31}, "handler 'first' has priority=2147483648"),
        ({"ordered": True, "on_dead_key": "stop"}, "on_dead_key='stop'; expected one of 'park', 'continue'"),
        ({"partitions": 0}, "has partitions=0; expected 'auto', or a whole number from 1 to 64"),
        ({"partitions": 65}, "has partitions=65; expected 'auto', or a whole number from 1 to 64"),
        ({"partitions": True}, "has partitions=True; expected 'auto', or a whole number from 1 to 64"),
        ({"partitions": 1.5}, "has partitions=1.5; expected 'auto', or a whole number from 1 to 64"),
        ({"partitions": None}, "has partitions=None; expected 'auto', or a whole number from 1 to 64"),
        ({"total_concurrency": 0}, "has total_concurrency=0; expected 1 or more"),
        ({"total_concurrency": "4"}, "has total_concurrency='4'; expected 1 or more"),
        # each is allowed, but not together
        (
            {"partitions": 16, "total_concurrency": 4},
            "total_concurrency=4 and partitions=16: each partition needs at least one run, so the events of some "
            "partitions would never run; raise total_concurrency to 16 or more",
        ),
        (
            {"partitions": 2, "batch": Batch(schedule="0 0 * * *")},
            "partitions=2 and batch=Batch(schedule=...): each process would produce a report of its part",
        ),
        ({"delivery": "at_most_once", "retry": RetryPolicy()}, "a handler that runs at most once is never retried"),
        ({"delivery": "at_most_once", "batch": Batch()}, "delivery='at_most_once' and batch="),
        ({"ordered": True, "batch": Batch(schedule="0 0 * * *")}, "ordered=True and batch=Batch(schedule="),
        ({"on_dead_key": "park"}, "on_dead_key='park' without ordered=True"),
        ({"on_dead_key": "continue", "ordered": False}, "on_dead_key='continue' without ordered=True"),
        ({"batch": Batch(), "types": (Strict,)}, "has batch= and is for Strict, which has strict_priority=True"),
        ({"batch": Batch(), "types": (StrictToo,)}, "has batch= and is for StrictToo, which has strict_priority=True"),
        # an option of other objects, and an unknown option
        ({"schedule": "0 0 * * *"}, "has schedule=: it is part of the batch, as in batch=Batch(schedule=...)"),
        ({"max_wait": "1s"}, "has max_wait=: it is part of the batch"),
        ({"size": 5}, "has size=: it is part of the batch"),
        ({"strict_priority": True}, "has strict_priority=: it belongs to the event"),
        ({"ordering_key": "w"}, "has ordering_key=: it belongs to the event, as in tx.emit(event, ordering_key=...)"),
        ({"max_attempts": 3}, "has max_attempts=: it is part of the retry policy"),
        ({"prioritiy": 3}, "has prioritiy=: there is no such option; did you mean priority?"),
        ({"xyz": 3}, "has xyz=: there is no such option; there is retry, timeout"),
        ({"function": 5}, "handler 'first' must be a function, async or plain: here is not a function"),
        ({"function": Opened}, "here is a class; register an object of an EventHandler class with add_handler()"),
        ({"function": plain_around_async}, "here is a plain function around an async one; write its decorator's"),
        ({"function": generates}, "here is a generator function, whose call returns before its first line"),
        ({"function": generates_async}, "here is a generator function, whose call returns before its first line"),
        (
            {"function": lambda envelope: None, "delivery": "transactional"},
            "handler 'first' has delivery='transactional' and is a plain function (here): it runs in a thread",
        ),
    ],
)
def test_an_invalid_handler_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        make(**options)

    assert message in str(caught.value)


def test_a_name_may_be_as_long_as_its_column() -> None:
    assert registry(make("x" * 255, aliases={"y" * 255})).names == ["x" * 255, "y" * 255]


def test_a_handler_needs_an_event_type_or_a_topic() -> None:
    with pytest.raises(RegistrationError, match="names neither event types nor a topic"):
        make_handler(
            handle,
            name="first",
            event_types=(),
            aliases=(),
            topic=None,
            where="here",
        )


@pytest.mark.parametrize("thing", [dict, Opened(), EventEnvelope])
def test_only_event_classes_have_handlers(thing: Any) -> None:
    with pytest.raises(RegistrationError, match="which is not an Event class"):
        make("first", thing)


def test_a_callable_object_with_an_async_call_is_a_handler() -> None:
    class Callable:
        async def __call__(self, envelope: EventEnvelope[Any]) -> None:
            pass

    assert make(function=Callable()).name == "first"


# --- what a handler gets -------------------------------------------------------------------------


def subscribed_types(handler: Handler) -> list[str]:
    return [subscription.event_type for subscription in registry(handler).subscriptions()]


def test_a_handler_of_a_base_class_is_subscribed_to_its_subclasses() -> None:
    assert subscribed_types(make("first", Moved)) == ["Moved", "MovedFar"]


def test_a_class_and_its_base_are_subscribed_once() -> None:
    assert subscribed_types(make("first", Moved, MovedFar)) == ["Moved", "MovedFar"]


def test_a_handler_is_subscribed_to_the_aliases_of_its_types() -> None:
    assert subscribed_types(make("first", Closed)) == ["Closed", "Shut"]


def test_a_subclass_defined_later_is_subscribed_as_well() -> None:
    class Base(Event):
        pass

    handlers = registry(make("first", Base))
    before = [subscription.event_type for subscription in handlers.subscriptions()]

    class Later(Base):
        pass

    assert before == ["Base"]
    assert [subscription.event_type for subscription in handlers.subscriptions()] == [Later.__base__.__name__, "Later"]


def test_a_topic_handler_is_subscribed_only_to_its_topic() -> None:
    (subscription,) = registry(make("first", Opened, topic="audit")).subscriptions()

    assert (subscription.topic, subscription.event_type) == ("audit", "")


def test_two_classes_with_one_name_are_refused() -> None:
    class Other(Event, type_name="Opened"):
        pass

    with pytest.raises(AmbiguousTypeName, match="'Opened'"):
        registry(make("first", Opened), make("second", Other))


def test_a_stored_type_is_decoded_as_the_matching_subclass() -> None:
    handler = make("first", Moved)
    handlers = registry(handler)

    assert handlers.event_class(handler, "MovedFar") is MovedFar
    assert handlers.event_class(handler, "Opened") is None


def test_a_stored_type_is_found_by_its_alias() -> None:
    handler = make("first", Closed)

    assert registry(handler).event_class(handler, "Shut") is Closed


# --- the class form ------------------------------------------------------------------------------


class WithOptions(EventHandler[Opened]):
    name = "with-options"
    aliases = ("old",)
    timeout = "5s"
    concurrency = 3
    retry = RetryPolicy(max_attempts=2)

    async def handle(self, envelope: EventEnvelope[Opened]) -> None:
        pass


def test_class_attributes_are_the_options() -> None:
    handler = handler_from_object(WithOptions())

    assert (handler.name, handler.aliases, handler.event_types) == ("with-options", frozenset({"old"}), (Opened,))
    assert handler.options.timeout == timedelta(seconds=5)
    assert (handler.options.concurrency, handler.options.retry) == (3, RetryPolicy(max_attempts=2))
    assert handler.where.endswith("test_handler.WithOptions")


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("schedule", "batch=Batch(schedule=...)"),
        ("max_wait", "batch=Batch(max_wait=...)"),
        ("strict_priority", "event"),
    ],
)
def test_an_unsupported_attribute_is_refused(attribute: str, message: str) -> None:
    misled = type("Misled", (WithOptions,), {attribute: "0 0 * * *"})

    with pytest.raises(RegistrationError, match=f"has {attribute}=") as caught:
        handler_from_object(misled())

    assert message in str(caught.value)


def test_a_subclass_of_a_strict_event_is_strict() -> None:
    assert registry(make("first", Strict)).strict_types() == {"Strict", "StrictToo"}
    assert registry(make("first", Opened)).strict_types() == frozenset()


def test_options_may_be_set_on_the_instance() -> None:
    configured = WithOptions()
    configured.concurrency = 7  # type: ignore[misc]
    configured.name = "renamed"  # type: ignore[misc]

    handler = handler_from_object(configured)

    assert (handler.name, handler.options.concurrency) == ("renamed", 7)


def test_a_function_as_class_level_retry_is_not_bound() -> None:
    def in_an_hour(attempts: int, error: BaseException) -> timedelta:
        return timedelta(hours=attempts)

    class Retries(EventHandler[Opened]):
        name = "retries"
        retry = in_an_hour

        async def handle(self, envelope: EventEnvelope[Opened]) -> None:
            pass

    policy = handler_from_object(Retries()).options.retry

    assert policy.wait_after(2, ValueError(), timedelta()) == timedelta(hours=2)


def test_a_static_method_as_class_level_retry_gets_attempts_and_error() -> None:
    class Retries(EventHandler[Opened]):
        name = "retries"

        @staticmethod
        def retry(attempts: int, error: BaseException) -> timedelta:
            return timedelta(hours=attempts)

        async def handle(self, envelope: EventEnvelope[Opened]) -> None:
            pass

    policy = handler_from_object(Retries()).options.retry

    assert policy.wait_after(2, ValueError(), timedelta()) == timedelta(hours=2)


def test_a_union_as_type_parameter_means_several_event_types() -> None:
    class Both(EventHandler[Opened | Closed]):
        name = "both"

        async def handle(self, envelope: EventEnvelope[Opened | Closed]) -> None:
            pass

    assert handler_from_object(Both()).event_types == (Opened, Closed)


def test_event_types_take_precedence_over_the_type_parameter() -> None:
    class Some(EventHandler[Event]):
        name = "some"
        event_types = (Moved, Closed)

        async def handle(self, envelope: EventEnvelope[Event]) -> None:
            pass

    assert handler_from_object(Some()).event_types == (Moved, Closed)


def test_the_type_parameter_is_inherited() -> None:
    class Special(WithOptions):
        name = "special"

    assert handler_from_object(Special()).event_types == (Opened,)


T = TypeVar("T", bound=Event)


class Logs(EventHandler[T], Generic[T]):
    async def handle(self, envelope: EventEnvelope[T]) -> None:
        pass


def test_a_generic_handler_class_passes_its_type_parameter_on() -> None:
    class LogsMoves(Logs[Moved]):
        name = "logs-moves"

    assert handler_from_object(LogsMoves()).event_types == (Moved,)


def test_a_topic_needs_no_event_types_in_the_class_form() -> None:
    class Audit(EventHandler[Event]):
        name = "audit"
        topic = "audit"

        async def handle(self, envelope: EventEnvelope[Event]) -> None:
            pass

    handler = handler_from_object(Audit())

    assert (handler.topic, handler.event_types) == ("audit", ())


def test_a_class_without_a_name_is_refused() -> None:
    class Nameless(EventHandler[Opened]):
        async def handle(self, envelope: EventEnvelope[Opened]) -> None:
            pass

    with pytest.raises(RegistrationError, match="Nameless has no name"):
        handler_from_object(Nameless())


def test_a_class_without_event_types_is_refused() -> None:
    class Untyped(EventHandler):  # type: ignore[type-arg]
        name = "untyped"

        async def handle(self, envelope: EventEnvelope[Any]) -> None:
            pass

    with pytest.raises(RegistrationError, match="names neither event types nor a topic"):
        handler_from_object(Untyped())


def test_a_class_with_a_synchronous_handle_is_accepted_unless_transactional() -> None:
    class Plain(EventHandler[Opened]):
        name = "plain"

        def handle(self, envelope: EventEnvelope[Opened]) -> None:
            pass

    class InTransaction(Plain):
        delivery = "transactional"

    assert is_async(handler_from_object(Plain()).function)
    with pytest.raises(RegistrationError, match="handler 'plain' has delivery='transactional' and is a plain function"):
        handler_from_object(InTransaction())


def test_a_class_instead_of_an_instance_is_refused() -> None:
    with pytest.raises(RegistrationError, match="takes an EventHandler object"):
        handler_from_object(WithOptions)  # type: ignore[arg-type]


def test_a_class_without_a_handle_method_is_refused() -> None:
    class Empty(EventHandler[Opened]):
        name = "empty"

    with pytest.raises(
        RegistrationError, match=r"'empty' .*Empty\) has no method `async def handle\(self, envelope\)`"
    ):
        handler_from_object(Empty())


# --- on an outbox --------------------------------------------------------------------------------


def test_the_decorator_returns_the_function() -> None:
    outbox = Outbox("sqlite://", namespace="app")

    assert outbox.handler(Opened, name="first")(handle) is handle


def test_a_name_is_required() -> None:
    outbox = Outbox("sqlite://", namespace="app")

    with pytest.raises(TypeError, match="name"):
        outbox.handler(Opened)  # type: ignore[call-arg]


def test_the_error_names_both_functions() -> None:
    outbox = Outbox("sqlite://", namespace="app")
    outbox.handler(Opened, name="first")(handle)

    with pytest.raises(RegistrationError, match=r"test_handler\.handle .* and .*test_handler\.WithOptions"):
        outbox.add_handler(_named(WithOptions(), "first"))


def _named(handler: EventHandler[Any], name: str) -> EventHandler[Any]:
    handler.name = name  # type: ignore[misc]
    return handler
