"""systemd: datagrams on real sockets, by path and with an abstract name."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outboxio.health.systemd import ServiceManager


@contextmanager
def manager_at(address: str) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address)
        receiver.settimeout(5)
        yield receiver


def test_a_field_is_a_datagram_to_a_path(tmp_path: Path) -> None:
    with manager_at(str(tmp_path / "notify")) as receiver:
        ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")}).tell("READY=1", "STATUS=works")

        assert receiver.recv(100) == b"READY=1\nSTATUS=works"


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are of Linux")
def test_a_field_is_a_datagram_to_an_abstract_socket() -> None:
    name = f"outboxio-test-{os.getpid()}"
    with manager_at(f"\0{name}") as receiver:
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).tell("STOPPING=1")

        assert receiver.recv(100) == b"STOPPING=1"


def test_without_a_service_manager_nothing_is_sent() -> None:
    manager = ServiceManager({"WATCHDOG_USEC": "1000000"})

    manager.tell("READY=1")
    assert manager.watchdog is None


def test_a_service_manager_that_is_gone_ends_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})

    manager.tell("READY=1")
    manager.tell("STOPPING=1")

    assert ["does not take READY=1" in record.getMessage() for record in caplog.records] == [True]


def test_an_address_of_another_kind_is_refused_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": "vsock:2:1234"}).tell("READY=1")

    assert "expected a path, or an abstract socket" in caplog.text


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_that_of_this_process(environ: dict[str, str], seconds: float | None, tmp_path: Path) -> None:
    assert ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify"), **environ}).watchdog == seconds


async def test_the_watchdog_is_fed_only_while_the_process_is_live(tmp_path: Path) -> None:
    asked, answers = asyncio.Semaphore(0), iter([True, False, ValueError("no health"), True])

    async def is_live() -> bool:
        answer = next(answers, False)
        asked.release()
        if isinstance(answer, ValueError):
            raise answer
        return answer

    with manager_at(str(tmp_path / "notify")) as receiver:
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000"}
        async with ServiceManager(environ).watched(is_live), asyncio.timeout(10):
            for _ in range(5):
                await asked.acquire()
        receiver.setblocking(False)
        assert [receiver.recv(100), receiver.recv(100)] == [b"WATCHDOG=1"] * 2
        with pytest.raises(BlockingIOError):
            receiver.recv(100)
