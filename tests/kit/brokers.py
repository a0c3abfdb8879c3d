"""Message brokers for tests: NATS with JetStream, RabbitMQ and Redis, each from installed programs on a free port.

The fixtures ``nats``, ``rabbitmq`` and ``redis`` (``tests/conftest.py``) give a running `Broker`. It is the broker at
``OUTBOXIO_TEST_<NAME>_URL`` where this variable is set, else a private broker that the session starts once. Messages
of earlier tests may be in it, so a test names its own streams, queues and keys with `Broker.fresh_name`.
``own_nats``, ``own_rabbitmq`` and ``own_redis`` always give a private broker, which the test may stop, restart
and kill. A broker keeps its messages over a restart.

A missing program skips the test, or fails the test if ``OUTBOXIO_TEST_REQUIRE`` names the program.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.parse import urlsplit

from tests.kit.ports import free_port
from tests.kit.programs import programs
from tests.kit.servers import (
    STARTING_TAKES_AT_MOST,
    CannotStart,
    _give_to_server_user,
    _keep_running,
    _private_directory,
    _run_as_server_user,
    _tail,
)

USER, PASSWORD = "outboxio", "secret"
"""The account of private brokers."""

B = TypeVar("B", bound="OwnBroker")

_numbers = itertools.count(1)


class Broker:
    """A running broker; ``url`` has the account in it."""

    def __init__(self, url: str, source: str) -> None:
        self.url = url
        self.source = source

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None, self.url
        return port

    @property
    def url_with_wrong_password(self) -> str:
        """The URL with a wrong password."""
        return self.url.replace(f":{PASSWORD}@", ":wrong@")

    def fresh_name(self, stem: str = "t") -> str:
        """A name for a stream, queue or key that no other test uses."""
        return f"{stem}-{os.getpid()}-{time.time_ns() // 1_000_000}-{next(_numbers)}"


class OwnBroker(Broker, ABC):
    """A private broker that keeps its messages when it is stopped.

    ``tls_url`` leads to the same broker with TLS. The certificate is for ``localhost``; ``certificate`` is its path, as
    a client needs it to trust the broker.
    """

    name: ClassVar[str]
    program: ClassVar[str]

    def __init__(self, ends: ExitStack, settings: str = "") -> None:
        self._path = self._find()
        self._home = _private_directory(ends)
        self._settings = settings
        self._ends: ExitStack | None = None
        self._port, self.tls_port = free_port(), free_port()
        self.certificate, self._key = _certificate(self._home)
        super().__init__(self._url(), f"programs: {self._path}")
        self._prepare()
        _give_to_server_user(self._home)
        ends.callback(self.stop)

    @property
    def is_running(self) -> bool:
        return self._ends is not None

    @property
    @abstractmethod
    def tls_url(self) -> str:
        """The URL of the listener with TLS, with the host name of the certificate."""

    def start(self) -> None:
        """Start the broker and wait until it answers. Does nothing if it is running."""
        if self._ends is not None:
            return
        with ExitStack() as ends:
            self._launch(ends)
            self._wait_until_ready()
            self._ends = ends.pop_all()

    def stop(self) -> None:
        """Shut down cleanly: connections are closed, messages are kept. Does nothing if the broker is stopped."""
        if self._ends is not None:
            ends, self._ends = self._ends, None
            ends.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """Kill the broker without a shutdown, as in a power failure."""
        assert self._ends is not None, f"{self.name} is not running"
        os.kill(self._server_process(), signal.SIGKILL)
        self.stop()

    def _find(self) -> str:
        return programs.need(self.program)

    @abstractmethod
    def _url(self) -> str: ...

    def _prepare(self) -> None:
        """Write configuration files."""

    @abstractmethod
    def _launch(self, ends: ExitStack) -> None: ...

    @abstractmethod
    def _answers(self) -> bool: ...

    def _keep(
        self, ends: ExitStack, command: list[str], environ: Mapping[str, str] | None = None, log: str = "log"
    ) -> None:
        """Run a program until the stack ends."""
        here = self._home / f"running-{log}"  # the program's keeper process removes the folder at its end
        here.mkdir(exist_ok=True)
        _give_to_server_user(self._home)
        settings = [f"{name}={value}" for name, value in (environ or {}).items()]
        # exec: a signal to the keeper's child is a signal to the server
        pid = 'echo $$ > "$1"; shift; exec env "$@"'
        command = ["sh", "-c", pid, "sh", str(self._home / f"{log}.pid"), *settings, *command]
        _keep_running(ends, here, self._home / log, signal.SIGTERM, command)

    def _server_process(self) -> int:
        return int((self._home / "log.pid").read_text())

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 2 * STARTING_TAKES_AT_MOST
        while time.monotonic() < deadline:
            try:
                if self._answers():
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise CannotStart(f"{self.name} does not answer on port {self._port}: {_tail(self._home / 'log')}")

    def _exchange(self, words: bytes) -> bytes:
        """The first bytes that the broker sends."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=5) as connection:
            connection.sendall(words)
            return connection.recv(4096)


class OwnNats(OwnBroker):
    """NATS with JetStream. Messages are at most 1 MB."""

    name = "nats"
    program = "nats-server"

    @property
    def tls_url(self) -> str:
        return f"tls://{USER}:{PASSWORD}@localhost:{self._port}"

    def _url(self) -> str:
        return f"nats://{USER}:{PASSWORD}@127.0.0.1:{self._port}"

    def _prepare(self) -> None:
        (self._home / "nats.conf").write_text(
            f'listen: "0.0.0.0:{self._port}"\nserver_name: "{self.fresh_name("server")}"\n'
            f'jetstream {{ store_dir: "{self._home / "data"}" }}\n'
            f'authorization {{ user: "{USER}", password: "{PASSWORD}" }}\n'
            f'tls {{ cert_file: "{self.certificate}", key_file: "{self._key}" }}\nallow_non_tls: true\n'
            f"{self._settings}\n"
        )

    def _launch(self, ends: ExitStack) -> None:
        self._keep(ends, [self._path, "-c", str(self._home / "nats.conf")])

    def _answers(self) -> bool:
        return b'"jetstream":true' in self._exchange(b"")


class OwnRedis(OwnBroker):
    """Redis with an append-only file. A value is at most 1 MB long, so that a test can exceed the limit cheaply."""

    name = "redis"
    program = "redis-server"

    @property
    def tls_url(self) -> str:
        return f"rediss://:{PASSWORD}@localhost:{self.tls_port}/0"

    def _url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self._port}/0"

    def _prepare(self) -> None:
        (self._home / "redis.conf").write_text(
            f"bind 127.0.0.1 ::1\nport {self._port}\ntls-port {self.tls_port}\n"
            f"tls-cert-file {self.certificate}\ntls-key-file {self._key}\ntls-auth-clients no\n"
            f"requirepass {PASSWORD}\ndir {self._home}\nappendonly yes\nappendfsync always\nsave ''\n"
            f"proto-max-bulk-len 1mb\n{self._settings}\n"
        )

    def _launch(self, ends: ExitStack) -> None:
        self._keep(ends, [self._path, str(self._home / "redis.conf")])

    def _answers(self) -> bool:
        return self._exchange(b"AUTH " + PASSWORD.encode() + b"\r\nPING\r\n").startswith(b"+OK")


class OwnRabbitmq(OwnBroker):
    """RabbitMQ with its own node, its own cookie and its own port mapper."""

    name = "rabbitmq"
    program = "rabbitmq-server"

    @property
    def tls_url(self) -> str:
        return f"amqps://{USER}:{PASSWORD}@localhost:{self.tls_port}/"

    def control(self, *arguments: str) -> None:
        """Run ``rabbitmqctl`` with these arguments."""
        program = str(Path(self._path).with_name("rabbitmqctl"))
        settings = [f"{name}={value}" for name, value in self._environ.items()]
        _run_as_server_user(self._home, ["env", *settings, program, "--node", self._node, *arguments])

    def _find(self) -> str:
        found = programs.need(self.program)
        programs.need("epmd")
        # Debian's program on the PATH requires the user rabbitmq and the machine's single node.
        real = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
        return str(real) if real.exists() else found

    def _url(self) -> str:
        return f"amqp://{USER}:{PASSWORD}@127.0.0.1:{self._port}/"

    def _prepare(self) -> None:
        self._node = f"outboxio{self._port}@localhost"
        self._mapper = free_port()
        home = self._home
        (home / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self._port}\nlisteners.ssl.1 = 127.0.0.1:{self.tls_port}\n"
            f"ssl_options.cacertfile = {self.certificate}\nssl_options.certfile = {self.certificate}\n"
            f"ssl_options.keyfile = {self._key}\nssl_options.verify = verify_none\n"
            f"default_user = {USER}\ndefault_pass = {PASSWORD}\nmax_message_size = 1048576\n"
            f"disk_free_limit.absolute = 1MB\nvm_memory_high_watermark.absolute = 1GB\n"
            f"log.console = true\nlog.file = false\n{self._settings}\n"
        )
        (home / "enabled_plugins").write_text("[].\n")
        self._environ = {
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(home / "none"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "none.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
            "RABBITMQ_LOG_BASE": str(home / "logs"),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
            "ERL_EPMD_PORT": str(self._mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "HOME": str(home),
        }

    def _launch(self, ends: ExitStack) -> None:
        # The port mapper of Erlang would outlive the broker if the broker had to start one.
        self._keep(ends, [programs.need("epmd"), "-port", str(self._mapper), "-address", "127.0.0.1"], log="mapper")
        self._keep(ends, [self._path], self._environ)

    def _server_process(self) -> int:
        return int((self._home / "mnesia" / f"{self._node}.pid").read_text())

    def _answers(self) -> bool:
        return self._exchange(b"AMQP\x00\x00\x09\x01").startswith(b"\x01")


OWN: Mapping[str, type[OwnBroker]] = {kind.name: kind for kind in (OwnNats, OwnRabbitmq, OwnRedis)}


class Brokers:
    """The brokers of a test session: started on demand, stopped by `close`."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._ends = ExitStack()
        self._own: dict[str, OwnBroker] = {}
        self._given: dict[str, Broker] = {}

    def take(self, name: str) -> Broker:
        """The broker at the given URL, else the session's own broker."""
        variable = f"OUTBOXIO_TEST_{name.upper()}_URL"
        if url := self._environ.get(variable):
            return self._given.setdefault(name, Broker(url, variable))
        return self.take_own(OWN[name])

    def take_own(self, kind: type[B]) -> B:
        """The session's own broker, running, also if an earlier test has stopped it."""
        if kind.name not in self._own:
            self._own[kind.name] = kind(self._ends)
        broker = self._own[kind.name]
        assert isinstance(broker, kind)
        broker.start()
        return broker

    def report(self) -> Iterator[str]:
        """Return one line for each broker that a test requested."""
        for name, broker in {**self._own, **self._given}.items():
            yield f"{name}: {broker.source}"

    def close(self) -> None:
        self._ends.close()


def _certificate(home: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate for ``localhost`` and its key."""
    certificate, key = home / "certificate.pem", home / "key.pem"
    subprocess.run(
        [programs.need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return certificate, key


#: The brokers of this test session.
brokers = Brokers()
