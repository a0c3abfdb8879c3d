"""The servers of a test session, and the effect of a missing server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit import programs
from tests.kit.servers import DIALECTS, CannotStart, Offer, Selection, Servers, Slot, mysql_root, slots_of


def offer(version: int, source: str = "somewhere") -> Offer:
    return Offer(version, source, lambda ends: f"postgresql://{source}/{version}")


def broken(version: int, undone: list[str]) -> Offer:
    def start(ends: ExitStack) -> str:
        ends.callback(undone.append, "half a start")
        raise CannotStart("the port is taken")

    return Offer(version, "broken", start)


def servers(*slots: Slot, **environ: str) -> Servers:
    return Servers(slots, Selection.from_environ(environ))


MISSING = Slot("postgres", "postgres", ())


def test_every_dialect_is_tested_and_optional_by_default() -> None:
    assert Selection.from_environ({}) == Selection(only=frozenset(DIALECTS), required=frozenset())


def test_dialects_are_given_as_a_list() -> None:
    selection = Selection.from_environ({"OUTBOXIO_TEST_ONLY": "sqlite", "OUTBOXIO_TEST_REQUIRE": " postgres, sqlite,"})
    assert selection == Selection(only=frozenset({"sqlite"}), required=frozenset({"postgres", "sqlite"}))


@pytest.mark.parametrize(
    ("variable", "known"),
    [
        ("OUTBOXIO_TEST_ONLY", "mariadb, mysql, postgres, sqlite$"),
        ("OUTBOXIO_TEST_REQUIRE", "mariadb, mysql, .*postgres, promtool, .*sqlite$"),
    ],
)
def test_an_unknown_name_is_refused(variable: str, known: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"{variable} does not know oracle; known are .*{known}"):
        Selection.from_environ({variable: "sqlite,oracle"})


def test_a_missing_program_is_skipped_or_fails_where_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_FURTHER_PLACES", ())
    nothing = {"PATH": str(tmp_path)}
    found = programs.Programs(nothing)
    with pytest.raises(pytest.skip.Exception, match="promtool: the program is missing: apt-get install"):
        found.need("promtool")
    assert [line.partition(", ")[0] for line in found.report()] == ["promtool: NOT TESTED"]
    required = programs.Programs({**nothing, "OUTBOXIO_TEST_REQUIRE": "sqlite, promtool"})
    with pytest.raises(pytest.fail.Exception, match="OUTBOXIO_TEST_REQUIRE names promtool, but the program is missing"):
        required.need("promtool")
    (tmp_path / "promtool").touch(mode=0o755)
    assert required.need("promtool") == str(tmp_path / "promtool")


def test_a_dialect_left_out_has_no_slot() -> None:
    found = Servers.find({"OUTBOXIO_TEST_ONLY": "sqlite"})
    assert [slot.id for slot in found.slots] == ["sqlite"]


def test_a_missing_server_is_a_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="set OUTBOXIO_TEST_POSTGRES_URL"):
        servers(MISSING).take(MISSING)


def test_a_missing_server_that_is_required_is_a_failure() -> None:
    with pytest.raises(pytest.fail.Exception, match="OUTBOXIO_TEST_REQUIRE names postgres"):
        servers(MISSING, OUTBOXIO_TEST_REQUIRE="postgres").take(MISSING)


def test_a_missing_server_is_reported() -> None:
    session = servers(MISSING)
    with pytest.raises(pytest.skip.Exception):
        session.take(MISSING)
    [(line, is_there)] = session.report()
    assert line.startswith("postgres: NOT TESTED, no server was found")
    assert not is_there


def test_a_failing_offer_is_undone_and_the_next_one_used() -> None:
    undone: list[str] = []
    [slot] = slots_of("postgres", [broken(15, undone), offer(15, "next")])
    session = servers(slot)
    assert session.take(slot).url == "postgresql://next/15"
    assert undone == ["half a start"]
    assert list(session.report()) == [
        ("postgres15: next", True),
        ("postgres15: passed over, broken: the port is taken", False),
    ]


def test_a_server_is_started_once() -> None:
    starts: list[str] = []

    def start(ends: ExitStack) -> str:
        starts.append("start")
        return "url"

    slot = Slot("postgres15", "postgres", (Offer(15, "counted", start),))
    session = servers(slot)
    assert session.take(slot) is session.take(slot)
    assert starts == ["start"]


def test_closing_the_session_ends_its_servers() -> None:
    ended: list[str] = []
    slot = Slot("postgres15", "postgres", (Offer(15, "x", lambda ends: str(ends.callback(ended.append, "end"))),))
    session = servers(slot)
    session.take(slot)
    assert ended == []
    session.close()
    assert ended == ["end"]


def test_postgres_is_tested_on_the_first_and_newest_version() -> None:
    slots = slots_of("postgres", [offer(15, "url"), offer(16, "programs"), offer(18, "wheel")])
    assert [(slot.id, [each.source for each in slot.offers]) for slot in slots] == [
        ("postgres15", ["url"]),
        ("postgres18", ["wheel"]),
    ]


def test_offers_of_one_version_replace_each_other() -> None:
    [slot] = slots_of("postgres", [offer(18, "docker"), offer(18, "wheel")])
    assert (slot.id, [each.source for each in slot.offers]) == ("postgres18", ["docker", "wheel"])


def test_without_an_offer_postgres_is_still_reported_missing() -> None:
    assert list(slots_of("postgres", [])) == [MISSING]


def test_a_second_server_starts_on_demand_and_stays_separate() -> None:
    [slot] = slots_of("mysql", [offer(9, "first")], further=[offer(9, "more")])
    session = servers(slot)
    assert session.take(slot).url == "postgresql://first/9"
    assert session.take(slot.another()).url == "postgresql://more/9"
    assert session.take(slot.another()) is session.take(slot.another())
    assert list(session.report()) == [("mysql9: first", True), ("mysql9-second: more", True)]


def test_a_second_server_has_the_same_version_if_possible() -> None:
    slots = slots_of("mysql", [offer(8, "url")], further=[offer(9, "unpacked"), offer(8, "docker")])
    assert [each.source for each in slots[0].another().offers] == ["docker", "unpacked"]


def test_a_missing_second_server_is_reported_like_a_first() -> None:
    [slot] = slots_of("mysql", [offer(9, "url")])
    session = servers(slot, OUTBOXIO_TEST_REQUIRE="mysql")
    session.take(slot)
    with pytest.raises(pytest.fail.Exception, match="OUTBOXIO_TEST_REQUIRE names mysql, but no second server"):
        session.take(slot.another())


def test_unpacked_mysql_programs_are_found_in_the_configured_folder() -> None:
    assert mysql_root({"OUTBOXIO_TEST_MYSQL_ROOT": "/opt/mysql", "XDG_CACHE_HOME": "/x"}) == Path("/opt/mysql")
    assert mysql_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/outboxio/mysql")
