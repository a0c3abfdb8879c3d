"""Lock files beside an SQLite file: none is created or opened through a link or in another user's folder."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outboxio import DatabaseUnavailable, Outbox
from outboxio.model.lock_name import LockName
from tests.kit.app import Emit, Journal, MoneyDeposited

LOCK = LockName("app", "fanout").text


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "app.db.locks"


@pytest.fixture
async def outbox(database: Path) -> AsyncIterator[Outbox]:
    async with Outbox(f"sqlite:///{database}", namespace="app") as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="first")(Journal())
        await outbox.executor.execute(Emit((1,)))
        yield outbox


async def refused(outbox: Outbox, place: Path, because: str) -> None:
    with pytest.raises(DatabaseUnavailable, match=because) as caught:
        await outbox.drain("5s")
    assert caught.value.where == str(place)


async def works_again(outbox: Outbox) -> None:
    assert (await outbox.drain("20s")).succeeded == 1


async def test_a_lock_directory_that_is_a_symbolic_link_is_rejected(
    outbox: Outbox, folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    os.mkdir(elsewhere)
    os.symlink(elsewhere, folder)

    await refused(outbox, folder, "it is a symbolic link or not a directory")

    assert os.listdir(elsewhere) == []
    os.unlink(folder)
    await works_again(outbox)


async def test_a_lock_file_that_is_a_symbolic_link_is_not_followed(
    outbox: Outbox, folder: Path, tmp_path: Path
) -> None:
    os.mkdir(folder)
    for target in (tmp_path / "new", tmp_path / "there"):
        (tmp_path / "there").write_text("precious")
        (folder / LOCK).symlink_to(target)
        await refused(outbox, folder / LOCK, "it is a symbolic link; remove it")
        (folder / LOCK).unlink()

    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there").read_text() == "precious"
    await works_again(outbox)


async def test_a_named_pipe_instead_of_a_lock_file_is_rejected_immediately(outbox: Outbox, folder: Path) -> None:
    os.mkdir(folder)
    os.mkfifo(folder / LOCK)

    await refused(outbox, folder / LOCK, "cannot lock")

    (folder / LOCK).unlink()
    await works_again(outbox)


async def test_a_file_instead_of_a_lock_directory_is_rejected(outbox: Outbox, folder: Path) -> None:
    os.mkfifo(folder)

    await refused(outbox, folder, "not a directory")


async def test_only_a_trusted_user_may_own_the_lock_directory(
    outbox: Outbox, folder: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkdir(folder)
    theirs = {str(folder): 4242}

    def owned(look: Any) -> Any:
        def stat(path: Any, *args: Any, **options: Any) -> Any:
            found = look(path, *args, **options)
            return found if str(path) not in theirs else os.stat_result((*found[:4], theirs[str(path)], *found[5:]))

        return stat

    monkeypatch.setattr(os, "lstat", owned(os.lstat))
    monkeypatch.setattr(os, "stat", owned(os.stat))

    await refused(outbox, folder, f"it belongs to user 4242, who is neither this user nor the owner of {database}")

    theirs[str(database)] = 4242
    await works_again(outbox)


async def test_symbolic_links_to_a_database_share_its_locks(
    outbox: Outbox, database: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to(database)
    async with Outbox(f"sqlite:///{tmp_path / 'link.db'}", namespace="app") as linked:
        linked.handler(MoneyDeposited, name="first")(Journal())
        await works_again(linked)

    assert (folder / LOCK).is_file()
    assert not (tmp_path / "link.db.locks").exists()
