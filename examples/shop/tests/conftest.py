"""The shop in a test: the real handlers, on a new database, with a fake mailer and a clock that the test moves.

``TEST_DATABASE`` is the URL of a database whose tables may be dropped; the default is an SQLite file for each test.
"""

import os
from collections.abc import AsyncGenerator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from outboxio import Outbox
from outboxio.testing import MovableClock
from shop.database import Sessions, with_driver
from shop.handlers import handlers
from shop.models import Base, Product
from shop.services import Bank, Mailer
from shop.web import app, open_session


class RememberingMailer(Mailer):
    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, to: str, subject: str) -> None:
        self.sent.append(f"{to}: {subject}")


@pytest.fixture
def mailer() -> RememberingMailer:
    return RememberingMailer()


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncGenerator[Sessions]:
    """Create a database with one product: 10 mugs."""
    engine = create_async_engine(with_driver(os.environ.get("TEST_DATABASE") or f"sqlite:///{tmp_path / 'shop.db'}"))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.drop_all)
        await connection.run_sync(Base.metadata.create_all)
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    async with sessions.begin() as session:
        session.add(Product(sku="mug", cents=900, stock=10))
    yield sessions
    await engine.dispose()


@pytest.fixture
async def outbox_under_test(
    sessions: Sessions, mailer: RememberingMailer, bank: Bank, outbox_clock: MovableClock
) -> AsyncGenerator[Outbox]:
    """The outbox for outboxio's fixtures. The namespace is new, because a server keeps the events of other tests."""
    resources = {Mailer: mailer, Bank: bank, Sessions: sessions}
    async with Outbox(sessions, namespace=f"shop-{uuid4()}", clock=outbox_clock, resources=resources) as outbox:
        outbox.include(handlers)
        await outbox.migrate()
        yield outbox


@pytest.fixture
async def client(outbox_for_tests: Outbox, sessions: Sessions) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of the web application, which uses the test's outbox."""

    async def open_session_of_test() -> AsyncGenerator[AsyncSession]:
        async with sessions() as session:
            yield session

    app.state.outbox = outbox_for_tests
    app.dependency_overrides[open_session] = open_session_of_test
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        yield client
    app.dependency_overrides.clear()
