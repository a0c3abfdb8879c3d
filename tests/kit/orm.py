"""Mapped classes for the tests of sessions, and engines for the URLs of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from sqlalchemy import ForeignKey, String
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from outboxio import Event
from outboxio.integrations.sqlalchemy import RaisesEvents
from tests.kit.opened_by import engine_url


class Noted(Event):
    text: str


class Base(DeclarativeBase):
    pass


class Order(RaisesEvents, Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20), default="order")
    state: Mapped[str] = mapped_column(String(20), default="new")
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "kind", "polymorphic_identity": "order"}

    def note(self, text: str) -> None:
        self.raise_event(Noted(text))


class GiftOrder(Order):
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "gift"}


class Line(MappedAsDataclass, RaisesEvents, Base, kw_only=True):
    """A dataclass, which Python cannot hash, with a key of two columns."""

    __tablename__ = "lines"
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@asynccontextmanager
async def a_sessionmaker(url: str) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    """A sessionmaker on the test's database, which has the tables of this module."""
    engine: AsyncEngine = create_async_engine(engine_url(url))
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield async_sessionmaker(engine, expire_on_commit=False)
    finally:
        await engine.dispose()
