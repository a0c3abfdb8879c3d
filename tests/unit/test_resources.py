"""Resources by type: checked at registration, injected into each run, and closed before its outcome is decided."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NewType, Protocol
from unittest.mock import MagicMock

import pytest

from outboxio import Batch, EventEnvelope, EventHandler, Outbox, RegistrationError, RetryPolicy
from outboxio.handlers.registration import Registration, Wiring
from outboxio.handlers.resources import is_factory
from outboxio.testing import drain, memory_outbox
from tests.kit.app import Emit, MoneyDeposited, hang

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]  # there is no such module, which is the point

Envelope = EventEnvelope[MoneyDeposited]
log: list[str] = []


class Mailer:
    pass


class Session:
    def __init__(self, name: str = "session") -> None:
        self.name = name


class Repository:
    def __init__(self, session: Session, mailer: Mailer) -> None:
        self.session = session


class Sends(Protocol):
    def send(self) -> None: ...


ReadSession = NewType("ReadSession", Session)
mailer = Mailer()


@pytest.fixture(autouse=True)
def _empty_log() -> None:
    log.clear()


@asynccontextmanager
async def make_session() -> AsyncIterator[Session]:
    log.append("session opened")
    try:
        yield Session()
    except BaseException as error:
        log.append(f"session saw {type(error).__name__}")
        raise
    finally:
        log.append("session closed")


def registered(function: Callable[..., Any], resources: Any, **options: Any) -> Callable[..., Any]:
    """The function that a run calls."""

    class Registered(Registration):
        def _refuse_while_running(self) -> None: ...

        @property
        def called(self) -> Callable[..., Any]:
            return next(iter(self._handlers)).function

    registration = Registered(Wiring(resources))
    registration.handler(MoneyDeposited, name="first", **options)(function)
    return registration.called


def refusal(function: Callable[..., Any], resources: Any, **options: Any) -> str:
    with pytest.raises(RegistrationError) as caught:
        registered(function, resources, **options)
    return str(caught.value)


async def given(function: Callable[..., Any], resources: Any) -> Any:
    """The result of a call with an unused envelope."""
    return await registered(function, resources)("envelope")


# --- at registration -------------------------------------------------------------------------------


async def with_mailer(envelope: Envelope, mailer: Mailer) -> Any:
    return mailer


async def with_keyword(envelope: Envelope, *, mailer: Mailer) -> Any:
    return mailer


async def with_default(envelope: Envelope, mailer: Mailer | None = None) -> Any:
    return mailer


async def with_annotated(envelope: Envelope, mailer: Annotated[Mailer, "of orders"]) -> Any:
    return mailer


async def with_unknown(envelope: Envelope, mailer: Unknown) -> None: ...
async def with_unknown_default(envelope: Envelope, mailer: Unknown = None) -> Any:
    return mailer


async def untyped(envelope: Envelope, mailer) -> None: ...  # type: ignore[no-untyped-def]  # which is the point
async def positional(envelope: Envelope, mailer: Mailer, /) -> None: ...
async def without(envelope: Envelope) -> None: ...


class Sender:
    async def method(self, envelope: Envelope, mailer: Mailer) -> Any:
        return mailer

    async def __call__(self, envelope: Envelope, mailer: Mailer) -> Any:
        return mailer


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        with_mailer, with_keyword, with_default, with_annotated, Sender().method, Sender(), logged(with_mailer),
        logged(Sender().method), partial(with_mailer),
    ],
)  # fmt: skip
async def test_a_parameter_with_a_resource_type_is_injected(function: Callable[..., Any]) -> None:
    assert await given(function, {Mailer: mailer}) is mailer


@pytest.mark.parametrize(
    ("function", "resources", "reason"),
    [
        (with_mailer, {Session: Session()}, "also requires 'mailer' ('mailer' of type Mailer; resources has Session)"),
        (with_keyword, {Session: 1, Repository: 2}, "resources has Repository, Session)"),
        (with_unknown, {Mailer: mailer}, "'mailer' of type 'Unknown', which cannot be resolved"),
        (untyped, {Mailer: mailer}, "'mailer' without an annotation"),
        (positional, {Mailer: mailer}, "also requires 'mailer'"),
        (with_mailer, {"mailer": mailer}, "also requires 'mailer'; give every other parameter a default"),
        (with_mailer, mailer, "also requires 'mailer'; give every other parameter a default"),
        (with_mailer, None, "add its type to Outbox(resources={type: value})"),
    ],
)
def test_a_missing_resource_is_refused_with_its_type_and_known_types(
    function: Callable[..., Any], resources: Any, reason: str
) -> None:
    message = refusal(function, resources)

    assert f"handler 'first' is called with one envelope, and {__name__}.{function.__name__} also" in message
    assert reason in message


def test_handler_classes_and_batch_handlers_are_refused_the_same_way() -> None:
    class Sends(EventHandler[MoneyDeposited]):
        name = "first"

        async def handle(self, envelope: Envelope, mailer: Mailer) -> None: ...

    async def of_batch(envelopes: list[Envelope], mailer: Mailer) -> None: ...

    with pytest.raises(RegistrationError, match="also requires 'mailer'"):
        Outbox("sqlite://", namespace="app").add_handler(Sends())
    assert "is called with a list of envelopes, and" in refusal(of_batch, {}, batch=Batch())


def test_a_handler_without_resources_is_called_directly() -> None:
    assert registered(without, {Mailer: mailer}) is without
    assert registered(with_default, {Session: Session()}) is with_default


async def test_partial_arguments_and_defaults_take_precedence_over_resources() -> None:
    other = Mailer()

    assert await given(partial(with_mailer, mailer=other), {Mailer: mailer}) is other
    assert await given(with_unknown_default, {Mailer: mailer}) is None


# --- values and factories ----------------------------------------------------------------------------


class Fake:
    def send(self) -> None: ...


def of_mailer() -> Mailer:
    return mailer


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (Mailer, mailer, False), (Mailer, Fake(), False), (Mailer, MagicMock(spec=Mailer), False),
        (Mailer, None, False), (Mailer, of_mailer, True), (Mailer, Mailer, True), (Mailer, lambda: mailer, True),
        (Mailer, Sender(), True), (Mailer, partial(of_mailer), True), (Sends, Fake(), False), (Sends, of_mailer, True),
        (type[Mailer], Mailer, False),
        (Callable[[], Mailer], of_mailer, False), (ReadSession, Session(), False), (ReadSession, Session, True),
        (Annotated[Mailer, "of orders"], mailer, False), (Annotated[Sender, "of orders"], Sender(), False),
        (Mapping[str, int], {}, False),
    ],
)  # fmt: skip
def test_a_callable_that_is_not_an_instance_is_a_factory(key: Any, value: Any, expected: bool) -> None:
    assert is_factory(key, value) is expected


class Opened:
    """A session that is a context manager itself, as many clients are."""

    async def __aenter__(self) -> Opened:
        log.append("opened")
        return self

    async def __aexit__(self, *_: object) -> None:
        log.append("closed")


async def async_factory() -> Session:
    return Session("async")


async def async_generator() -> AsyncIterator[Session]:
    yield Session("async generator")
    log.append("closed")


def generator() -> Iterator[Session]:
    yield Session("generator")
    log.append("closed")


@contextmanager
def context() -> Iterator[Session]:
    yield Session("context")
    log.append("closed")


@pytest.mark.parametrize(
    ("factory", "name", "closes"),
    [
        (lambda: Session("plain"), "plain", False), (Session, "session", False), (async_factory, "async", False),
        (async_generator, "async generator", True), (generator, "generator", True), (context, "context", True),
        (asynccontextmanager(async_generator), "async generator", True),
        (partial(Session, "partial"), "partial", False),
    ],
)  # fmt: skip
async def test_a_factory_creates_a_resource_per_run_and_contexts_are_closed(
    factory: Callable[..., Any], name: str, closes: bool
) -> None:
    async def handle(envelope: Any, session: Session) -> Session:
        log.append("ran")
        return session

    function = registered(handle, {Session: factory})

    first, second = await function("envelope"), await function("envelope")
    assert (first.name, first is second) == (name, False)
    assert log == ["ran", "closed"] * 2 if closes else ["ran", "ran"]


async def test_an_object_that_is_a_context_manager_is_entered_and_exited() -> None:
    async def handle(envelope: Any, opened: Opened) -> None:
        log.append("ran")

    await given(handle, {Opened: Opened})
    assert log == ["opened", "ran", "closed"]


async def test_a_factory_gets_the_envelope_and_resources_created_once_per_run() -> None:
    sessions: list[Session] = []

    def of_envelope(envelope: EventEnvelope[Any]) -> Session:
        sessions.append(Session(f"of {envelope}"))
        return sessions[-1]

    async def handle(envelope: Any, session: Session, repository: Repository, reads: ReadSession) -> None:
        assert repository.session is session is sessions[0]
        assert reads.name == "of envelope, by a lambda"

    resources = {
        Repository: Repository,
        Session: of_envelope,
        Mailer: mailer,
        ReadSession: lambda envelope: Session(f"of {envelope}, by a lambda"),
    }
    await given(handle, resources)
    assert len(sessions) == 1


def of_session(session: Session) -> Mailer:
    return Mailer()


async def yields_of_session(session: Session) -> AsyncIterator[Mailer]:
    yield Mailer()


def test_circular_factories_are_refused() -> None:
    def of_mailer(mailer: Mailer) -> Session:
        return Session()

    message = refusal(with_mailer, {Mailer: of_session, Session: of_mailer})
    assert message == "handler 'first' needs resources that depend on each other: Mailer -> Session -> Mailer"


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (of_session, "also requires 'session' ('session' of type Session); a factory may take"),
        (asynccontextmanager(yields_of_session), "also requires 'session' ('session' of type Session); "),
        (lambda session: Mailer(), "also requires 'session' ('session' without an annotation); "),
    ],
)
def test_a_factory_without_a_resource_is_refused_with_its_name(factory: Callable[..., Any], reason: str) -> None:
    message = refusal(with_mailer, {Mailer: factory})

    assert f"handler 'first' needs Mailer, and its factory {factory.__module__}.{factory.__qualname__} " in message
    assert reason in message
    assert message.endswith("resources has Mailer")


def test_an_unused_factory_is_not_checked() -> None:
    registered(without, {Repository: Repository, Mailer: Repository})


# --- in a run --------------------------------------------------------------------------------------


async def test_a_session_is_opened_and_closed_for_each_run() -> None:
    async with memory_outbox(resources={Session: make_session}) as outbox:

        @outbox.handler(MoneyDeposited, name="first", ordered=True)
        async def first(envelope: Envelope, session: Session) -> None:
            log.append("ran")

        await outbox.executor.execute(Emit((1,)))
        await drain(outbox)
        await outbox.executor.execute(Emit((2,)))
        await drain(outbox)

    assert log == ["session opened", "ran", "session closed"] * 2


async def test_a_failing_run_closes_its_resources_with_the_error() -> None:
    async with memory_outbox(resources={Session: make_session}) as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def first(envelope: Envelope, session: Session) -> None:
            raise ValueError("no")

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(ValueError, match="no"):
            await drain(outbox)

    assert log == ["session opened", "session saw ValueError", "session closed"]


async def test_a_timeout_closes_the_resources_and_counts_as_a_failure() -> None:
    async with memory_outbox(resources={Session: make_session}) as outbox:

        @outbox.handler(MoneyDeposited, name="first", timeout="50ms")
        async def first(envelope: Envelope, session: Session) -> None:
            await hang()

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(TimeoutError, match="ran longer than its timeout"):
            await drain(outbox)

    assert log == ["session opened", "session saw CancelledError", "session closed"]


async def test_an_error_of_closing_fails_the_run() -> None:
    async def fails_at_the_end() -> AsyncIterator[Session]:
        yield Session()
        raise ConnectionError("the session cannot be closed")

    async with memory_outbox(resources={Session: fails_at_the_end}) as outbox:

        @outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=1))
        async def first(envelope: Envelope, session: Session) -> None:
            envelope.emit(MoneyDeposited(envelope.event.wallet_id, envelope.event.amount))

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(ConnectionError, match="cannot be closed"):
            await drain(outbox)

        counts = await outbox.admin.counts()
        assert (counts["DEAD"], counts["SUCCEEDED"]) == (1, 0)


class Swallows(AbstractContextManager["Swallows"]):
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return True


async def test_a_resource_cannot_swallow_an_error_of_a_run_or_factory() -> None:
    async def fails(envelope: Any, swallows: Swallows) -> None:
        raise ValueError("of the handler")

    async def needs_more(envelope: Any, swallows: Swallows, session: Session) -> None: ...

    def no_session() -> Session:
        raise ValueError("of the factory")

    with pytest.raises(ValueError, match="of the handler"):
        await given(fails, {Swallows: Swallows})
    with pytest.raises(ValueError, match="of the factory"):
        await given(needs_more, {Swallows: Swallows, Session: no_session})


async def test_a_handler_in_a_thread_gets_resources_from_the_event_loop() -> None:
    threads: list[int] = []

    async def of_loop() -> AsyncIterator[Session]:
        threads.append(threading.get_ident())
        yield Session()
        threads.append(threading.get_ident())

    async with memory_outbox(resources={Session: of_loop, Mailer: mailer}) as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        def first(envelope: Envelope, session: Session, mailer: Mailer) -> None:
            threads.append(threading.get_ident())

        @outbox.handler(MoneyDeposited, name="values")
        def values(envelope: Envelope, mailer: Mailer) -> None:
            assert isinstance(mailer, Mailer)

        await outbox.executor.execute(Emit((1,)))
        assert (await drain(outbox)).succeeded == 2

    opened, ran, closed = threads
    assert opened == closed == threading.get_ident() != ran


async def test_a_batch_is_one_run_and_factories_get_its_first_envelope() -> None:
    async def of_envelope(envelope: Envelope) -> AsyncIterator[Session]:
        log.append(f"opened for {envelope.event.amount}")
        yield Session()
        log.append("closed")

    async with memory_outbox(resources={Session: of_envelope}) as outbox:

        @outbox.handler(MoneyDeposited, name="first", batch=Batch(size=10, max_wait=0))
        async def first(envelopes: list[Envelope], session: Session) -> list[Envelope]:
            log.append(f"ran {len(envelopes)}")
            return []

        await outbox.executor.execute(Emit((1, 2, 3)))
        await drain(outbox)

    assert log == ["opened for 1", "ran 3", "closed"]


async def test_envelopes_and_transactions_still_have_all_resources() -> None:
    resources = {Mailer: mailer, "limit": 3}
    async with memory_outbox(resources=resources) as outbox:

        @outbox.handler(MoneyDeposited, name="first", delivery="transactional")
        async def first(envelope: Envelope, mailer: Mailer) -> None:
            assert envelope.resources is envelope.tx.resources is resources

        await outbox.executor.execute(Emit((1,)))
        assert (await drain(outbox)).succeeded == 1
