"""``make service``: migrate, start a web process and a worker, send requests, and show what happened.

``DATABASE`` is the URL of a database; the default is a new SQLite file in ``build``. With ``--serve`` the service keeps
running afterwards. Your own service does not need this file.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import make_url

from tests.webhooks import SECRET, signature

HERE = Path(__file__).parent
BUILD = HERE / "build"
LOG = BUILD / "log.jsonl"
PASSWORD = "secret"
PATIENCE = 60.0  # seconds; everything takes about ten

Process = subprocess.Popen[bytes]


class Demo:
    def __init__(self, database: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = str(port)
        self._client = httpx.Client(base_url=self.url, timeout=PATIENCE)
        secrets = {"WEBHOOK_SECRETS": SECRET, "DASHBOARD_PASSWORD": PASSWORD}
        self._environment = {**os.environ, **secrets, "DATABASE_URL": database}
        self._processes: list[Process] = []
        self._log = LOG.open("wb")

    def run(self) -> None:
        title("Set up")
        self.start("create the tables", "alembic", "upgrade", "head").wait()
        web = ("uvicorn", "--factory", "service.web:create_app", "--port", self._port, "--log-config", "logging.json")
        self.start("the web process, which only writes", *web)
        worker = self.start_worker("the worker, which runs the handlers")
        self.until("the web process answers", self.is_ready)
        orders, cents = self.sales()

        title("Orders, and webhooks of the payment provider")
        ada, bob, eve = self.order("ada", 1800), self.order("bob", 900), self.order("eve", 2700)
        self.send("an order of a negative amount", "/orders", '{"email": "ada@example.org", "cents": -5}', expect=422)
        self.pay("ada pays", ada, 1800)
        self.pay("the same webhook again", ada, 1800)
        self.pay("bob pays", bob, 900)
        self.pay("eve pays too little", eve, 100)
        self.pay("signed, but not a payment", eve, "a lot", expect=422)
        self.pay("a wrong signature", eve, 2700, secret="whsec_b3RoZXI=", expect=401)
        self.until("the payments of ada and bob are recorded", lambda: self.has_paid(ada, bob))

        title("The worker is killed, and the orders continue")
        worker.kill()
        worker.wait()
        self._processes.remove(worker)
        dan = self.order("dan", 500)
        self.pay("dan pays", dan, 500)
        self.start_worker("a new worker")
        self.until("the payment of dan is recorded", lambda: self.has_paid(dan))
        self.until("the sales are up to date", lambda: self.sales() == (orders + 3, cents + 3200))

        title("Results")
        for name, order_id in (("ada", ada), ("bob", bob), ("eve", eve), ("dan", dan)):
            order = self.read(f"/orders/{order_id}")
            say(f"order {order_id}, {name}: {order['state']}", "; ".join(order["timeline"]))
        say("sales, each payment counted once", "3 orders, 32.00")
        self.start("the dead letters", "outboxio", "dead", logs=False).wait()
        page = self._client.get("/outbox/", auth=("ops", PASSWORD)).raise_for_status()
        say("dashboard, user ops, password secret", str(page.url))

    def start(self, about: str, program: str, *arguments: str, logs: bool = True) -> Process:
        say(about, f"$ {program} {' '.join(arguments)}")
        output = self._log if logs else None
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        process = subprocess.Popen(
            command, cwd=HERE, env=self._environment, stdout=output, stderr=output, start_new_session=True
        )  # a new session, so that Ctrl-C reaches only this script
        self._processes.append(process)
        return process

    def start_worker(self, about: str) -> Process:
        return self.start(about, "outboxio", "worker", "service.worker:outbox", "--log-format", "json")

    def stop(self) -> None:
        """Stop the processes as Kubernetes does: SIGTERM, then wait. uvicorn's exit status is then that signal."""
        for process in self._processes:
            process.terminate()
        codes = {process.wait(PATIENCE) for process in self._processes}
        if not codes <= {0, -signal.SIGTERM}:
            raise SystemExit(f"a process failed; see {LOG}")

    def order(self, name: str, cents: int) -> int:
        body = json.dumps({"email": f"{name}@example.org", "cents": cents})
        order_id: int = self.send(f"{name} orders", "/orders", body, expect=201)["id"]
        return order_id

    def pay(self, about: str, order_id: int, cents: object, *, secret: str = SECRET, expect: int = 200) -> None:
        """Send a webhook as the payment provider does. A repeated webhook has the same id."""
        body = json.dumps({"order_id": order_id, "cents": cents})
        headers = signature(body, id=f"payment-{order_id}-{cents}", secret=secret)
        self.send(about, "/webhooks/payments", body, headers=headers, expect=expect)

    def send(self, about: str, path: str, body: str, *, expect: int, headers: dict[str, str] | None = None) -> Any:
        response = self._client.post(
            path, content=body, headers={"content-type": "application/json", **(headers or {})}
        )
        say(about, f"POST {path} -> {response.status_code} {response.text if response.is_success else ''}")
        if response.status_code != expect:
            raise SystemExit(f"expected {expect}: {response.text}")
        return response.json()

    def read(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return self._client.get("/ready").is_success
        return False

    def has_paid(self, *orders: int) -> bool:
        return all(len(self.read(f"/orders/{order}")["timeline"]) == 2 for order in orders)

    def sales(self) -> tuple[int, int]:
        """Return the number of paid orders and their cents."""
        days = self.read("/sales")
        return sum(day["orders"] for day in days), sum(day["cents"] for day in days)

    def until(self, about: str, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds or a process fails."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline or any(process.poll() for process in self._processes):
                raise SystemExit(f"failed before {about}; see {LOG}")
            time.sleep(0.1)


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


def say(about: str, text: str) -> None:
    print(f"  {about:<38} {text}".rstrip(), flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    serve = "--serve" in sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir()
    database = os.environ.get("DATABASE") or f"sqlite:///{BUILD / 'service.db'}"
    print(f"An order service on FastAPI, SQLAlchemy, Alembic, Pydantic and outboxio\ndatabase: {make_url(database)!r}")
    demo = Demo(database, 8000 if serve else free_port())
    try:
        demo.run()
        if serve:
            print(f"\nThe service is running: {demo.url}/docs and {demo.url}/outbox/. Ctrl-C stops it.", flush=True)
            with suppress(KeyboardInterrupt):
                signal.pause()
    finally:
        demo.stop()
    hint = "" if serve else " `make service ARGS=--serve` keeps the service running."
    print(f"\nEverything is as expected. The log is {LOG.relative_to(HERE)}.{hint}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
