"""Programs of the tests as forks of a process that has imported their modules already.

To import outboxio, the drivers and the kit costs 0.3 s of computing time, and the tests start hundreds of processes.
A server, ``python -m tests.kit.forked``, imports them once. It has no thread, no event loop and no connection of a
database, so a fork is like a new process with the environment of the test.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]

STORAGES = ("outboxio.storage.mysql", "outboxio.storage.postgres", "outboxio.storage.sqlite")
FOR_COMMANDS = (*STORAGES, "outboxio.cli.app")
FOR_PROGRAMS = (*STORAGES, "tests.flow.worker")
"""The modules that a server imports, with all that they import. Commands list the events of their process, so the
server of the commands knows none of the kit's."""

LARGEST = 2**17
"""Bytes of a request."""


class Started:
    """A running program, whose outputs the caller reads."""

    def __init__(self, pid: int, ended: socket.socket, stdin: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        """The exit code; negative for a signal."""
        self._ended = asyncio.create_task(self._end(ended))

    async def wait(self) -> int:
        """Wait until the program has ended, and return its exit code."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    async def _end(self, ended: socket.socket) -> int:
        with ended:
            code = await asyncio.get_running_loop().sock_recv(ended, LARGEST)
        assert code, "the fork server has ended"
        self.returncode = int(code)
        return self.returncode


class Forked(Started):
    """A running program, with the part of ``asyncio.subprocess.Process`` that the tests use."""

    def __init__(
        self, pid: int, ended: socket.socket, stdin: asyncio.StreamWriter, outputs: Sequence[asyncio.StreamReader]
    ) -> None:
        super().__init__(pid, ended, stdin)
        self.stdout, *_ = self._outputs = outputs

    @property
    def stderr(self) -> asyncio.StreamReader:
        return self._outputs[1]

    async def communicate(self) -> tuple[bytes, ...]:
        """Wait until the program has ended, and return the rest of its outputs."""
        self.stdin.close()
        outputs = await asyncio.gather(*(output.read() for output in self._outputs))
        await self.wait()
        return tuple(outputs)


async def fork(
    program: str,
    *arguments: str,
    folder: Path = ROOT,
    environ: Mapping[str, str] = os.environ,
    with_stderr: bool = False,
) -> Forked:
    """Run ``python -m program`` with pipes for its input and its output, and with the tests' standard error or a pipe
    for it."""
    pid, ended, stdin, outputs = await _start(program, arguments, folder, environ, with_stderr=with_stderr)
    return Forked(pid, ended, stdin, [await _reader(output) for output in outputs])


async def start(program: str, *arguments: str) -> tuple[Started, int]:
    """The same, with the file of its output, which the caller reads."""
    pid, ended, stdin, [output] = await _start(program, arguments, ROOT, os.environ, with_stderr=False)
    return Started(pid, ended, stdin), output


async def _start(
    program: str, arguments: Sequence[str], folder: Path, environ: Mapping[str, str], *, with_stderr: bool
) -> tuple[int, socket.socket, asyncio.StreamWriter, list[int]]:
    loop = asyncio.get_running_loop()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = [os.pipe() for _ in range(2 + with_stderr)]
    stdin, to_stdin = pipes[0]
    outputs = [output for _, output in pipes[1:]]
    request = {"program": program, "arguments": arguments, "folder": str(folder), "environ": dict(environ)}
    try:
        files = [theirs.fileno(), stdin, *outputs, *([] if with_stderr else [2])]
        socket.send_fds(
            _server(FOR_PROGRAMS if program.startswith("tests.") else FOR_COMMANDS),
            [json.dumps(request).encode()],
            files,
        )
    finally:
        theirs.close()
        for file in (stdin, *outputs):
            os.close(file)
    pid = int(mine.recv(LARGEST))
    mine.setblocking(False)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(to_stdin, "wb", 0))
    return pid, mine, asyncio.StreamWriter(transport, protocol, None, loop), [output for output, _ in pipes[1:]]


async def _reader(file: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(file, "rb", 0))
    return reader


_servers: dict[tuple[int, Sequence[str]], socket.socket] = {}
"""By the process that has started them, and by the modules that they import."""


def _server(modules: Sequence[str]) -> socket.socket:
    """The connection to a server, which is started for the first program."""
    key = os.getpid(), modules
    if key not in _servers:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server = subprocess.Popen([sys.executable, "-m", "tests.kit.forked", *modules], cwd=ROOT, stdin=theirs)
        _servers[key] = mine
        atexit.register(_stop, server, os.getpid(), mine)
    return _servers[key]


def _stop(server: subprocess.Popen[bytes], process: int, connection: socket.socket) -> None:
    connection.close()
    if process == os.getpid():
        server.wait()


# --- the server ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Child:
    """The task of a fork, in the fork."""

    program: str
    arguments: list[str]
    folder: str
    environ: dict[str, str]

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environ)
        encoding = self.environ.get("PYTHONIOENCODING")
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(self.folder)
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        sys.argv = [self.program, *self.arguments]
        if not hasattr(sys.modules.get(self.program), "__path__"):
            sys.modules.pop(self.program, None)
        runpy.run_module(self.program, run_name="__main__", alter_sys=True)


def serve(requests: socket.socket) -> Child | None:
    """Fork for each request, and report the exit codes. Return in each fork, and when the requests end."""
    ends, on_end = socket.socketpair()
    ends.setblocking(False)
    on_end.setblocking(False)
    signal.set_wakeup_fd(on_end.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end their programs
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([requests, ends], [], [])
        if ends in ready:
            ends.recv(LARGEST)
            _report_ends(running)
        if requests not in ready:
            continue
        request, files, _, _ = socket.recv_fds(requests, LARGEST, 4)
        if not request:
            return None
        caller = socket.socket(fileno=files[0])
        if pid := os.fork():
            for file in files[1:]:
                os.close(file)
            running[pid] = caller
            caller.send(str(pid).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for file, number in zip(files[1:], range(3), strict=True):
            os.dup2(file, number)
            os.close(file)
        for connection in (caller, ends, on_end, *running.values()):
            connection.close()
        requests.detach()  # its file is the standard input now
        return Child(**json.loads(request))


def _report_ends(running: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with running.pop(found[0]) as caller, suppress(OSError):  # the caller may have ended
                caller.send(str(os.waitstatus_to_exitcode(found[1])).encode())


def main() -> None:
    for module in sys.argv[1:]:
        import_module(module)
    gc.freeze()
    if child := serve(socket.socket(fileno=0)):
        child.run()


if __name__ == "__main__":
    main()
