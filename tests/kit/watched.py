"""Tables as retention keeps them: finished, dead and due rows.

``tests/contract/test_operator_plans.py`` fills small tables, ``benchmarks/operating.py`` tables of the size of a year.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from tests.kit.app import Look

FIRST_POSITION = datetime(2030, 1, 1)
"""The time of row 0. Each further row is a second later."""
NOW = FIRST_POSITION + timedelta(days=3000)
HANDLERS = 20
SHARED = 2
"""The handlers with partitions: the first ones."""
PARTITIONS = 16
ORDERED = "h02"
PARKED_KEYS = 200
UNDELIVERED = 3000
OPERATION = UUID(int=77)
AT_ONCE = 50_000


NUMBERS = {
    "postgres": "SELECT i FROM generate_series({first}, {last}) AS g(i)",
    "mysql": """SELECT {first} + a.i * 1000 + b.i AS i FROM (
      WITH RECURSIVE d(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM d WHERE i < 999) SELECT i FROM d WHERE i < 50) a
      STRAIGHT_JOIN (WITH RECURSIVE d(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM d WHERE i < 999) SELECT i FROM d) b
      ON {first} + a.i * 1000 + b.i <= {last}""",
    "sqlite": """WITH RECURSIVE d(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM d WHERE i < {last})
      SELECT i FROM d""",
}

COLUMNS = """namespace, action_id, action_name, action_params, started_date, completion_date, model_id, model_type,
  event_type, payload, event_date, sequence, ordering_key, correlation_id, causation_id, headers, hops"""
COPIED = """'app', {action}, 'Deposit', '{{"amount": 1}}', {time}, {time}, {text_of_i}, 'Wallet', {type},
  '{{"amount": 1, "currency": "EUR", "note": "a payload of a common length, as an application might write it"}}',
  {time}, i + 1, {key}, {correlation}, {cause}, '{{}}', 0"""
EVENTS = f"""
INSERT INTO {{{{events}}}} (id, delivered, {COLUMNS}) SELECT {{event}}, {{delivered}}, {COPIED} FROM ({{numbers}}) n
"""
NOTIFICATIONS = f"""
INSERT INTO {{{{event_notifications}}}} (id, event_id, handler_name, state, attempts, next_retry_at, created_date,
  updated_date, priority, errors, retention_from, partition_number, {COLUMNS})
SELECT {{id}}, {{event}}, {{handler}}, {{state}}, 1, {{due}}, {{time}}, {{time}}, 0, ({{errors}}){{as_json}},
  {{time}}, {{partition}}, {COPIED} FROM ({{numbers}}) n
"""


class Filling:
    """Write the rows of tables by SQL. Rows have numbers; states, ids, dates and values follow from the number.

    Of 253 rows 23 are DEAD, 10 are PENDING, and the rest SUCCEEDED.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._kind = "mysql" if look.dialect in ("mysql", "mariadb") else look.dialect
        self._total = 0

    async def fill(self, total: int) -> None:
        """Write rows until there are ``total`` notifications, and as many events."""
        values = self._values()
        await self._insert(EVENTS, self._total, total, {**values, "delivered": "TRUE"})
        await self._insert(NOTIFICATIONS, self._total, total, values)
        self._total = total

    async def fill_beside(self) -> None:
        """Write parked keys with BLOCKED rows behind, undelivered events, the partitions, and an operation."""
        values, first = self._values(), 10**8
        parked = values | {"handler": f"'{ORDERED}'", "key": self._joined("'b'", f"(i % {PARKED_KEYS})")}
        for state, number in (("DEAD", PARKED_KEYS), ("BLOCKED", 10 * PARKED_KEYS)):
            await self._insert(NOTIFICATIONS, first, first + number, parked | {"state": f"'{state}'"})
            first += number
        await self._insert(EVENTS, first, first + UNDELIVERED, values | {"delivered": "FALSE"})
        if not self._look.is_file:
            for number in range(SHARED):
                row = f"'app', 'h{number:02}', {PARTITIONS}, {PARTITIONS}, {PARTITIONS}, '{FIRST_POSITION}', NULL, NULL"
                await self._look.fetch(f"INSERT INTO {{handler_partitions}} VALUES ({row})")
        await self._look.fetch(f"""
            INSERT INTO {{operations}} (id, namespace, kind, state, request, actor, origin, matched, done, refused,
              worker, stop_ordered, created_date, updated_date)
            VALUES ('{OPERATION}', 'app', 'retry', 'RUNNING', '{{}}', 'ada', 'code', 0, 0, 0, 'me', FALSE,
              '{FIRST_POSITION}', '{FIRST_POSITION}')""")

    async def _insert(self, statement: str, first: int, until: int, values: dict[str, str]) -> None:
        for start in range(first, until, AT_ONCE):
            numbers = NUMBERS[self._kind].format(first=start, last=min(start + AT_ONCE, until) - 1)
            # The values have braces of JSON, so that they are put in one by one.
            text = statement
            for name, value in {**values, "numbers": numbers}.items():
                text = text.replace(f"{{{name}}}", value)
            await self._look.fetch(text.replace("{{", "{").replace("}}", "}"))

    def _values(self) -> dict[str, str]:
        is_shared = f"i % {HANDLERS} < {SHARED}"
        turn, request = self._quotient("i", HANDLERS), self._joined("'request-'", self._quotient("i", 100))
        key = self._joined("'k'", f"({turn} % 5000)")
        in_future = self._time(f"{10**9} + i")
        later = f"CASE WHEN i % 7 = 0 THEN {in_future} ELSE {self._time('i')} END"
        trace = 'File \\\\"app.py\\\\", line 1, in handle ' * 35
        if self._kind != "mysql":
            trace = trace.replace("\\\\", "\\")
        errors = self._joined(
            "CASE WHEN i % 3 = 0 THEN '[{\"type\": \"ValueError\"' ELSE '[{\"type\": \"ConnectionError\"' END",
            "', \"message\": \"pdf:8080 refused after '", "i", f"' ms\", \"traceback\": \"{trace}\"}}]'",
        )  # fmt: skip
        return {
            "id": self._id("01910000", "i"), "event": self._id("01900000", "i"),
            "action": self._id("01920000", self._quotient("i", 5)),
            "cause": f"CASE WHEN i % 10 > 0 THEN {self._id('01900000', 'i - i % 10')} END",
            "correlation": f"CASE WHEN i < 10000 THEN 'import' WHEN i % 10 = 0 THEN {request} END",
            "handler": self._joined("'h'", f"CASE WHEN i % {HANDLERS} < 10 THEN '0' ELSE '' END", f"(i % {HANDLERS})"),
            "key": f"CASE WHEN i % {HANDLERS} = 2 THEN {key} END",
            "partition": "0" if self._look.is_file else f"CASE WHEN {is_shared} THEN {turn} % {PARTITIONS} ELSE 0 END",
            "type": self._joined("'T'", "(i % 8)"), "text_of_i": self._joined("''", "i"),
            "time": self._time("i"), "due": later,
            "errors": f"CASE WHEN i % 11 = 0 THEN {errors} ELSE '[]' END",
            "state": "CASE WHEN i % 11 = 0 THEN 'DEAD' WHEN i % 23 = 1 THEN 'PENDING' ELSE 'SUCCEEDED' END",
            "as_json": "::jsonb" if self._kind == "postgres" else "",
        }  # fmt: skip

    def _joined(self, *texts: str) -> str:
        return f"CONCAT({', '.join(texts)})" if self._kind != "sqlite" else f"({' || '.join(texts)})"

    def _quotient(self, number: str, by: int) -> str:
        return f"({number} DIV {by})" if self._kind == "mysql" else f"({number} / {by})"

    def _id(self, prefix: str, number: str) -> str:
        digits = {
            "postgres": f"lpad(to_hex({number}), 12, '0')", "mysql": f"LPAD(LOWER(HEX({number})), 12, '0')",
            "sqlite": f"printf('%012x', {number})",
        }[self._kind]  # fmt: skip
        text = self._joined(f"'{prefix}-0000-7000-8000-'", digits)
        return f"{text}::uuid" if self._kind == "postgres" else text

    def _time(self, seconds: str) -> str:
        return {
            "postgres": f"(timestamp '{FIRST_POSITION}' + ({seconds}) * interval '1 s')",
            "mysql": f"DATE_ADD('{FIRST_POSITION}', INTERVAL ({seconds}) SECOND)",
            "sqlite": f"strftime('%Y-%m-%d %H:%M:%S.000000', '{FIRST_POSITION}', ({seconds}) || ' seconds')",
        }[self._kind]
