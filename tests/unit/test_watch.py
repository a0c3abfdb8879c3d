"""Which connections are given up, and above all which are not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from outboxio.storage.connections import watch as watch_module
from outboxio.storage.connections.watch import ServerSession, Sessions, Watch
from tests.kit.app import eventually

pytestmark = pytest.mark.virtual_time

SERVER, ANOTHER = "one server", "another server"
LONG = 60.0


class KeyQueue:
    """Stands for a connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: object | None = None  # that is waited for


class Scene:
    """A watch over some connections, and a server with scripted answers."""

    def __init__(self, lines: int = 1, *, answered_within: float = LONG) -> None:
        self.lines = [KeyQueue(number) for number in range(lines)]
        self.used = list(self.lines)
        self.idle: dict[int, float | None] = dict.fromkeys(range(lines), LONG)
        self.server = SERVER
        self.asked = 0
        self.ended: dict[int, str] = {}
        self.is_silent = self.refuses = self.is_shared = False
        self.while_asked = lambda: None
        self.watch = Watch(
            "the scene", used=lambda: self.used, waits_for=lambda line: line.answer, ask=self._ask,
            answered_within=answered_within, end=self._end,
        )  # fmt: skip
        for line in self.lines:
            self.watch.knows(line, ServerSession(SERVER, line.number))

    async def _ask(self, numbers: Sequence[int]) -> Sessions | None:
        self.asked += 1
        await asyncio.sleep(LONG if self.is_silent else 0)
        self.while_asked()
        if self.refuses:
            raise ConnectionRefusedError
        return None if self.is_shared else Sessions(self.server, {n: self.idle[n] for n in numbers if n in self.idle})

    def _end(self, line: KeyQueue, why: str) -> None:
        self.used.remove(line)
        self.ended[line.number] = why

    async def asks(self, times: int = 3) -> None:
        """Wait until the server was asked so often."""
        await eventually(lambda: self.asked >= times, timeout=10)
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK", 0.01), ("PATIENCE", 0.05), ("SUSPECT_PATIENCE", 0.02), ("ASKED_AGAIN", 0.02)):
        monkeypatch.setattr(watch_module, name, seconds)


async def test_a_connection_whose_session_is_idle_while_we_wait_is_given_up() -> None:
    scene = Scene()
    scene.lines[0].answer = object()
    scene.watch.begin()

    await eventually(lambda: scene.ended, timeout=10)

    assert "no answer" in scene.ended[0]
    assert "nothing to do for it" in scene.ended[0]


async def test_a_statement_may_take_as_long_as_the_server_is_at_work_on_it() -> None:
    scene = Scene()
    scene.lines[0].answer, scene.idle[0] = object(), None
    scene.watch.begin()

    await scene.asks()

    assert scene.ended == {}
    await scene.watch.close()


async def test_a_session_that_has_just_become_idle_may_have_its_answer_on_the_way() -> None:
    scene = Scene()
    scene.lines[0].answer, scene.idle[0] = object(), watch_module.IDLE_FOR / 2
    scene.watch.begin()

    await scene.asks()

    assert scene.ended == {}
    await scene.watch.close()


async def test_nobody_is_asked_about_a_connection_on_which_nothing_is_waited_for() -> None:
    scene = Scene()
    scene.watch.begin()
    await asyncio.sleep(0.2)

    assert (scene.asked, scene.ended) == (0, {})
    await scene.watch.close()


async def test_nobody_is_asked_while_answers_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "PATIENCE", 0.5)
    scene = Scene()
    scene.watch.begin()
    for _ in range(70):
        scene.lines[0].answer = object()
        await asyncio.sleep(0.01)

    assert (scene.asked, scene.ended) == (0, {})
    await scene.watch.close()


async def test_an_answer_that_comes_while_the_server_is_asked_saves_the_connection() -> None:
    scene = Scene()
    scene.lines[0].answer = object()
    scene.while_asked = lambda: setattr(scene.lines[0], "answer", object())
    scene.watch.begin()

    await scene.asks()

    assert scene.ended == {}
    await scene.watch.close()


async def test_a_connection_whose_session_is_gone_is_given_up_whether_anything_is_waited_for_or_not() -> None:
    scene = Scene(2)
    scene.lines[0].answer, scene.idle[0] = object(), None
    del scene.idle[1]
    scene.watch.begin()

    await eventually(lambda: scene.ended, timeout=10)

    assert scene.ended == {1: "the server has no such session any more"}
    await scene.watch.close()


async def test_a_server_has_nothing_to_say_about_the_sessions_of_another_one() -> None:
    """Behind a balancer, a new connection may lead to a different server, whose sessions have the same numbers."""
    scene = Scene(2)
    scene.lines[0].answer, scene.server = object(), ANOTHER
    del scene.idle[1]
    scene.watch.begin()

    await scene.asks()

    assert scene.ended == {}
    await scene.watch.close()


async def test_where_a_proxy_shares_sessions_their_numbers_mean_nothing() -> None:
    scene = Scene()
    scene.lines[0].answer, scene.is_shared = object(), True
    scene.watch.begin()

    await scene.asks()

    assert scene.ended == {}
    await scene.watch.close()


async def test_a_server_that_answers_no_new_connection_either_is_silent() -> None:
    scene = Scene(2, answered_within=0.05)
    scene.lines[0].answer, scene.is_silent = object(), True
    scene.watch.begin()

    await eventually(lambda: scene.ended, timeout=10)

    assert scene.asked == watch_module.MOST_SILENCES
    assert list(scene.ended) == [0]
    assert "neither were 2 new connections answered" in scene.ended[0]
    await scene.watch.close()


async def test_one_silence_proves_nothing() -> None:
    scene = Scene(answered_within=0.05)
    scene.lines[0].answer, scene.idle[0], scene.is_silent = object(), None, True
    scene.watch.begin()

    await scene.asks(1)
    scene.is_silent = False
    await scene.asks(4)

    assert scene.ended == {}
    await scene.watch.close()


async def test_a_server_that_refuses_new_connections_is_not_silent() -> None:
    scene = Scene()
    scene.lines[0].answer, scene.refuses = object(), True
    scene.watch.begin()

    await scene.asks()

    assert scene.ended == {}
    await scene.watch.close()


async def test_a_server_is_not_asked_more_often_because_it_refuses_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have too many connections already."""
    monkeypatch.setattr(watch_module, "ASKED_AGAIN", LONG)
    scene = Scene()
    scene.lines[0].answer, scene.refuses = object(), True
    scene.watch.begin()

    await scene.asks(1)
    await asyncio.sleep(0.2)

    assert scene.asked == 1
    await scene.watch.close()


async def test_the_timer_ends_when_nothing_is_in_use_and_begins_again() -> None:
    scene = Scene()
    scene.watch.begin()
    scene.used.clear()
    await eventually(lambda: scene.watch._timer is None, timeout=10)

    scene.used.append(scene.lines[0])
    scene.lines[0].answer = object()
    scene.watch.begin()
    await eventually(lambda: scene.ended, timeout=10)


async def test_to_close_it_ends_what_is_under_way() -> None:
    scene = Scene()
    scene.lines[0].answer, scene.is_silent = object(), True
    scene.watch.begin()
    await scene.asks(1)
    before = len(asyncio.all_tasks())

    await scene.watch.close()

    assert len(asyncio.all_tasks()) == before - 1
    assert scene.watch._timer is None


def test_another_event_loop_has_a_watch_of_its_own() -> None:
    scene = Scene()

    async def wait_in_vain() -> None:
        scene.used[:] = scene.lines
        scene.lines[0].answer = object()
        scene.watch.begin()
        await eventually(lambda: scene.ended, timeout=10)
        scene.ended.clear()
        scene.used[:] = scene.lines  # a timer is left behind

    asyncio.run(wait_in_vain())
    asyncio.run(wait_in_vain())
