"""A real HTTP server on this machine that records the requests it receives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Receiver:
    """``texts`` are the messages that were answered 200. ``answers``: status codes before that, each used once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.texts: list[str] = []
        self.bodies: list[Any] = []
        self.answers: list[int] = []
        self.requests = 0


@contextmanager
def webhook() -> Iterator[Receiver]:
    """Yield the receiver once its server is listening."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.requests += 1
            code = receiver.answers.pop(0) if receiver.answers else 200
            if code == 200:
                assert self.headers["Content-Type"] == "application/json"
                receiver.bodies.append(body)
                receiver.texts.append(body["text"])
            self.send_response(code)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            raise AssertionError("a redirect was followed")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}/services/s3cret")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
