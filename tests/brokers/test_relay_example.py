"""The example of two services runs as it stands, and its proof is a real proof."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.relay import __main__ as story
from tests.kit.brokers import Broker
from tests.kit.programs import programs

ROOT = Path(__file__).parent.parent.parent


def test_the_example_proves_that_each_event_came_once_and_in_order() -> None:
    programs.need("nats-server")
    command = [sys.executable, "-m", "examples.relay", "--private"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    for part in ("started for this run", "The broker was restarted", "What was sent has arrived, once and in order."):
        assert part in run.stdout


def test_the_example_works_on_rabbitmq(rabbitmq: Broker) -> None:
    environment = {**os.environ, "RABBITMQ_URL": rabbitmq.url}
    environment.pop("NATS_URL", None)
    command = [sys.executable, "-m", "examples.relay"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    for part in ("The broker is RabbitMQ", "nothing is new", "What was sent has arrived, once and in order."):
        assert part in run.stdout


@pytest.mark.parametrize("numbers", [[1, 2, 2], [1, 3, 2], [1, 2], [1, 2, 3, 4]])
def test_the_proof_fails_for_a_lost_a_double_and_a_swapped_event(
    numbers: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    told = story.Story(None, Path())  # type: ignore[arg-type]  # the proof needs no broker
    told._sent = 3 * len(story.CUSTOMERS)
    right = {customer: [1, 2, 3] for customer in story.CUSTOMERS}
    assert told._proof(right)
    assert not told._proof(right | {"bob": numbers})
    assert "The proof FAILED" in capsys.readouterr().out
