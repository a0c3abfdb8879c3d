"""A terminal with an interactive shell, like that of a reader of a tutorial."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

SERVERS = ("uvicorn", "outboxio worker", "outboxio dashboard")
READS = ("curl localhost", "SHOP_TRACES=traces.jsonl python -m shop.tracing")
CTRL_C, CTRL_Z = b"\x03", b"\x1a"


class Terminal:
    """Type commands, and wait for their output."""

    def __init__(self, folder: Path, environment: Mapping[str, str], patience: float) -> None:
        """``patience``: seconds until a command must have ended, or a line must have appeared."""
        self._patience = patience
        self._text = ""
        self._seen = 0
        self._serves = False
        self._last = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-i"],
            stdin=slave, stdout=slave, stderr=slave, cwd=folder, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**environment, "TERM": "dumb", "PS1": "", "NO_COLOR": "1"},
        )  # fmt: skip
        os.close(slave)
        os.set_blocking(self._master, False)
        asyncio.get_running_loop().add_reader(self._master, self._read)

    async def type(self, line: str) -> None:
        """Type a command. A server in the foreground is ended before: by Ctrl-C, or suspended for ``kill ... %1``."""
        if self._is_busy and self._serves:
            os.write(self._master, CTRL_Z if line.startswith("kill ") else CTRL_C)
        await self._until(lambda: not self._is_busy, "the command before has not ended")
        self._serves = any(server in line for server in SERVERS)
        self._last = line
        os.write(self._master, line.encode() + b"\n")
        await self._until(lambda: line[:60] in self._text[self._seen :], "the command was not echoed")

    async def shows(self, lines: list[str]) -> None:
        """Wait until each of these lines, or parts of lines, has appeared since the last call.

        A read-only command is typed again, as by a reader who was too quick.
        """
        for _ in range(int(self._patience) * self._last.startswith(READS)):
            await asyncio.sleep(0.5)
            await self._until(lambda: not self._is_busy, "the command has not ended")
            if not self._missing(lines):
                break
            await self.type(self._last)
        await self._until(lambda: not self._missing(lines), f"missing: {lines}")
        self._seen = len(self._text)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
        # Each job has its own process group, and ignores the hangup where the tests run under nohup.
        for process in _in_session(self._shell.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._shell.wait()

    @property
    def _is_busy(self) -> bool:
        return os.tcgetpgrp(self._master) != self._shell.pid

    def _missing(self, lines: list[str]) -> list[str]:
        text = " ".join(self._text[self._seen :].split())
        return [line for line in lines if " ".join(line.split()) not in text]

    def _read(self) -> None:
        try:
            self._text += os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the shell has ended
            asyncio.get_running_loop().remove_reader(self._master)

    async def _until(self, condition: object, problem: str) -> None:
        assert callable(condition)
        for _ in range(int(self._patience / 0.05)):
            if condition():
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{problem}; the terminal shows:\n{self._text[self._seen :]}")


def _in_session(leader: int) -> Iterator[int]:
    """The processes of a session, its leader last. Without /proc only the leader."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == leader != int(process.name):
                yield int(process.name)
    yield leader
