"""``Handlers``: handlers declared without an outbox, included in one or several outboxes."""

from __future__ import annotations

import pytest

from outboxio import (
    AmbiguousTypeName,
    Batch,
    Event,
    EventEnvelope,
    EventHandler,
    Handlers,
    Outbox,
    RegistrationError,
)
from outboxio.testing import drain, memory_outbox
from tests.kit.app import Emit, MoneyDeposited

Envelope = EventEnvelope[MoneyDeposited]


class Mailer:
    def __init__(self) -> None:
        self.sent: list[str] = []


def handlers_of_receipts() -> Handlers:
    handlers = Handlers()

    @handlers.handler(MoneyDeposited, name="receipt", aliases={"mail"})
    async def receipt(envelope: Envelope, mailer: Mailer) -> None:
        mailer.sent.append("receipt")

    @handlers.handler(MoneyDeposited, name="report", batch=Batch(max_wait=0))
    async def report(envelopes: list[Envelope], mailer: Mailer) -> None:
        mailer.sent.append("report")

    class Audit(EventHandler[MoneyDeposited]):
        name = "audit"

        async def handle(self, envelope: Envelope, mailer: Mailer) -> None:
            mailer.sent.append("audit")

    handlers.add_handler(Audit())
    return handlers


async def test_handlers_run_in_each_outbox_with_its_own_resources() -> None:
    handlers = handlers_of_receipts()
    for mailer in (Mailer(), Mailer()):
        async with memory_outbox(resources={Mailer: mailer}) as outbox:
            outbox.include(handlers)
            await outbox.executor.execute(Emit((1,)))
            await drain(outbox)
        assert sorted(mailer.sent) == ["audit", "receipt", "report"]


async def test_handlers_may_include_other_handlers() -> None:
    all_handlers, mailer = Handlers(), Mailer()
    all_handlers.include(handlers_of_receipts())
    async with memory_outbox(resources={Mailer: mailer}) as outbox:
        outbox.include(all_handlers)
        await outbox.executor.execute(Emit((1,)))
        await drain(outbox)
    assert len(mailer.sent) == 3


def test_a_duplicate_name_is_refused_with_both_handlers_and_includes_nothing() -> None:
    async def mail(envelope: Envelope) -> None: ...

    outbox, handlers = Outbox("sqlite://", namespace="app", resources={Mailer: Mailer()}), handlers_of_receipts()
    outbox.handler(MoneyDeposited, name="mail")(mail)

    with pytest.raises(RegistrationError) as caught:
        outbox.include(handlers)

    assert "handler alias 'mail' is registered twice: by " in str(caught.value)
    assert "test_a_duplicate_name_is_refused" in str(caught.value)
    assert "handlers_of_receipts.<locals>.receipt" in str(caught.value)
    others = Handlers()
    others.handler(MoneyDeposited, name="report")(mail)
    outbox.include(others)  # "report" of the refused Handlers is not there


def test_the_same_handlers_cannot_be_included_twice() -> None:
    handlers, both = handlers_of_receipts(), Handlers()
    both.include(handlers)
    with pytest.raises(RegistrationError, match="is registered twice"):
        both.include(handlers)


def test_a_missing_resource_is_refused_when_the_handlers_are_included() -> None:
    with pytest.raises(RegistrationError, match=r"handler 'receipt' .* also requires 'mailer'"):
        Outbox("sqlite://", namespace="app").include(handlers_of_receipts())


def test_a_handler_added_after_include_is_refused() -> None:
    async def late(envelope: Envelope) -> None: ...

    handlers = Handlers()
    Outbox("sqlite://", namespace="app").include(handlers)

    with pytest.raises(RegistrationError, match="were already included"):
        handlers.handler(MoneyDeposited, name="late")(late)


async def test_handlers_must_be_included_before_running() -> None:
    async with memory_outbox() as outbox, outbox.running():
        with pytest.raises(RegistrationError, match="before running"):
            outbox.include(Handlers())


def test_only_handlers_can_be_included() -> None:
    outbox = Outbox("sqlite://", namespace="app")
    with pytest.raises(RegistrationError, match=r"include\(\) takes Handlers\(\), not "):
        outbox.include(outbox)  # type: ignore[arg-type]  # which is the point


def test_event_classes_are_included_too() -> None:
    handlers, outbox = Handlers(), Outbox("sqlite://", namespace="app")
    handlers.register(MoneyDeposited)
    outbox.include(handlers)

    with pytest.raises(AmbiguousTypeName):
        outbox.register(type("MoneyDeposited", (Event,), {}))
