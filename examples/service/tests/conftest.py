"""The service in a test: the real web application and handlers, on a new database, with a clock that the test moves.

``TEST_DATABASE`` is the URL of a database whose tables may be dropped; the default is an SQLite file for each test.
"""

import os
from collections.abc import AsyncGenerator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outboxio import Outbox
from outboxio.testing import MovableClock
from service.database import Sessions, with_driver
from service.mail import Mailer
from service.models import Base
from service.web import create_app
from service.worker import add_handlers
from tests.webhooks import SECRET


class FakeMailer(Mailer):
    def __init__(self) -> None:
        self.sent: list[str] = []
        self.is_down = False

    async def send(self, to: str, subject: str, *, key: str) -> None:
        if self.is_down:
            raise ConnectionError("the mail service did not answer")
        self.sent.append(f"{to}: {subject}")


@pytest.fixture
def mailer() -> FakeMailer:
    return FakeMailer()


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncGenerator[Sessions]:
    engine = create_async_engine(with_driver(os.environ.get("TEST_DATABASE") or f"sqlite:///{tmp_path / 'test.db'}"))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.drop_all)
        await connection.run_sync(Base.metadata.create_all)
    yield async_sessionmaker(engine, expire_on_commit=False)
    await engine.dispose()


@pytest.fixture
async def outbox_under_test(
    sessions: Sessions, mailer: FakeMailer, outbox_clock: MovableClock
) -> AsyncGenerator[Outbox]:
    """The outbox for outboxio's fixtures. The namespace is new, because a server keeps the events of other tests."""
    resources = {Mailer: mailer}
    async with Outbox(sessions, namespace=f"orders-{uuid4()}", clock=outbox_clock, resources=resources) as outbox:
        add_handlers(outbox)
        await outbox.migrate()
        yield outbox


@pytest.fixture
async def client(
    outbox_for_tests: Outbox, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[httpx.AsyncClient]:
    monkeypatch.setenv("WEBHOOK_SECRETS", SECRET)
    monkeypatch.setenv("DASHBOARD_PASSWORD", "secret")
    transport = httpx.ASGITransport(create_app(outbox_for_tests, sessions))
    async with httpx.AsyncClient(transport=transport, base_url="http://orders") as client:
        yield client
