"""Lock files beside an SQLite file: no file is created or opened through links, nor in a stranger's folder."""

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


async def test_a_folder_that_is_a_link_is_refused_by_name(outbox: Outbox, folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    os.mkdir(elsewhere)
    os.symlink(elsewhere, folder)

    await refused(outbox, folder, "it is a link, or no folder")

    assert os.listdir(elsewhere) == []
    os.unlink(folder)
    await works_again(outbox)


async def test_a_lock_file_that_is_a_link_is_refused_and_nothing_is_made_where_it_leads(
    outbox: Outbox, folder: Path, tmp_path: Path
) -> None:
    os.mkdir(folder)
    for target in (tmp_path / "new", tmp_path / "there"):
        (tmp_path / "there").write_text("precious")
        (folder / LOCK).symlink_to(target)
        await refused(outbox, folder / LOCK, "it is a link; remove it")
        (folder / LOCK).unlink()

    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there").read_text() == "precious"
    await works_again(outbox)


async def test_a_pipe_in_place_of_a_lock_file_is_refused_at_once(outbox: Outbox, folder: Path) -> None:
    os.mkdir(folder)
    os.mkfifo(folder / LOCK)

    await refused(outbox, folder / LOCK, "cannot lock")

    (folder / LOCK).unlink()
    await works_again(outbox)


async def test_what_is_no_folder_is_refused_by_name(outbox: Outbox, folder: Path) -> None:
    os.mkfifo(folder)

    await refused(outbox, folder, "no folder at all")


async def test_a_folder_of_another_user_is_refused_by_name_unless_the_database_is_that_users(
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

    await refused(outbox, folder, f"it belongs to the user 4242, neither to us nor to the owner of {database}")

    theirs[str(database)] = 4242
    await works_again(outbox)


async def test_a_database_that_is_reached_through_a_link_has_its_locks_beside_the_file(
    outbox: Outbox, database: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to(database)
    async with Outbox(f"sqlite:///{tmp_path / 'link.db'}", namespace="app") as linked:
        linked.handler(MoneyDeposited, name="first")(Journal())
        await works_again(linked)

    assert (folder / LOCK).is_file()
    assert not (tmp_path / "link.db.locks").exists()
