"""A private NATS server with JetStream, whose data outlive its stops. Tests stop, kill and restart it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.ports import free_port
from tests.kit.programs import programs


class NatsServer:
    """``settings`` is a part of the server's configuration file, as for TLS or users."""

    def __init__(self, home: Path, settings: str = "") -> None:
        self._program = programs.need("nats-server")
        self._home = home
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.configure(settings)

    def configure(self, settings: str) -> None:
        """The settings from the next start on."""
        self._home.mkdir(parents=True, exist_ok=True)
        text = f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self._home / "data"}" }}\n{settings}\n'
        (self._home / "nats.conf").write_text(text)

    def start(self) -> None:
        log = (self._home / "log").open("ab")
        self._process = subprocess.Popen([self._program, "-c", self._home / "nats.conf"], stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                if connection.recv(4) == b"INFO":
                    return
            assert self._process.poll() is None, (self._home / "log").read_text()[-2000:]
            time.sleep(0.02)
        raise AssertionError((self._home / "log").read_text()[-2000:])

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()


@contextmanager
def nats_server(home: Path, settings: str = "") -> Iterator[NatsServer]:
    """A running server, which is stopped at the end."""
    server = NatsServer(home, settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()
