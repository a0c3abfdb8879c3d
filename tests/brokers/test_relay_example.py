"""The example with two services runs unchanged, and its check detects errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.relay import __main__ as demo
from tests.kit.brokers import Broker
from tests.kit.programs import programs

ROOT = Path(__file__).parent.parent.parent


def test_in_the_example_each_event_arrives_once_and_in_order() -> None:
    programs.need("nats-server")
    command = [sys.executable, "-m", "examples.relay", "--private"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    for part in ("started for this run", "The broker was restarted", "Every event arrived once and in order."):
        assert part in run.stdout


def test_the_example_works_on_rabbitmq(rabbitmq: Broker) -> None:
    environment = {**os.environ, "RABBITMQ_URL": rabbitmq.url}
    environment.pop("NATS_URL", None)
    command = [sys.executable, "-m", "examples.relay"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    for part in ("The broker is RabbitMQ", "nothing is new", "Every event arrived once and in order."):
        assert part in run.stdout


@pytest.mark.parametrize("numbers", [[1, 2, 2], [1, 3, 2], [1, 2], [1, 2, 3, 4]])
def test_the_check_fails_for_lost_duplicate_and_swapped_events(
    numbers: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    example = demo.Demo(None, Path())  # type: ignore[arg-type]  # the check needs no broker
    example._sent = 3 * len(demo.CUSTOMERS)
    right = {customer: [1, 2, 3] for customer in demo.CUSTOMERS}
    assert example._verify(right)
    assert not example._verify(right | {"bob": numbers})
    assert "The check FAILED" in capsys.readouterr().out
