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
        ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")}).notify("READY=1", "STATUS=works")

        assert receiver.recv(100) == b"READY=1\nSTATUS=works"


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are of Linux")
def test_a_field_is_a_datagram_to_an_abstract_socket() -> None:
    name = f"outboxio-test-{os.getpid()}"
    with manager_at(f"\0{name}") as receiver:
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).notify("STOPPING=1")

        assert receiver.recv(100) == b"STOPPING=1"


def test_without_a_service_manager_nothing_is_sent() -> None:
    manager = ServiceManager({"WATCHDOG_USEC": "1000000"})

    manager.notify("READY=1")
    assert manager.watchdog is None


def test_a_missing_service_manager_is_logged_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})

    manager.notify("READY=1")
    manager.notify("STOPPING=1")

    assert ["could not send READY=1" in record.getMessage() for record in caplog.records] == [True]


def test_an_unsupported_address_is_reported_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": "vsock:2:1234"}).notify("READY=1")

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
def test_a_watchdog_of_another_process_is_ignored(
    environ: dict[str, str], seconds: float | None, tmp_path: Path
) -> None:
    assert ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify"), **environ}).watchdog == seconds


async def test_the_watchdog_is_notified_only_while_the_process_is_live(tmp_path: Path) -> None:
    probed, answers = asyncio.Semaphore(0), iter([True, False, ValueError("no health"), True])

    async def is_live() -> bool:
        answer = next(answers, False)
        probed.release()
        if isinstance(answer, ValueError):
            raise answer
        return answer

    with manager_at(str(tmp_path / "notify")) as receiver:
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000"}
        async with ServiceManager(environ).watched(is_live), asyncio.timeout(10):
            for _ in range(5):
                await probed.acquire()
        receiver.setblocking(False)
        assert [receiver.recv(100), receiver.recv(100)] == [b"WATCHDOG=1"] * 2
        with pytest.raises(BlockingIOError):
            receiver.recv(100)
