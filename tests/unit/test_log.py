"""The log: every entry is a single line, external text cannot add lines, and no entry shows a payload value."""

from __future__ import annotations

import enum
import importlib
import logging
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import pytest

import outboxio
from outboxio import InvalidEvent
from outboxio.support.codec import encode_object
from outboxio.support.log import MAX_SHOWN, Log, location_of, log_of, log_text
from tests.kit.hostile import DESCRIBED_BADLY, name_of
from tests.kit.sources import modules, text_of

CARD = "4111111111111111"
FORGED = "\n2030-01-01 ERROR outboxio forged"
BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\x1b[2J", "\0", "\u202e", "\ud800"]

logger = log_of("outboxio.test_log")


@pytest.fixture
def entries() -> Iterator[list[str]]:
    """The entries as a logging handler writes them."""
    written: list[str] = []

    class Writing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler, target = Writing(), logging.getLogger("outboxio")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    target.addHandler(handler)
    try:
        yield written
    finally:
        target.removeHandler(handler)


@pytest.mark.parametrize("line_break", BREAKS, ids=ascii)
def test_no_text_in_a_log_entry_adds_a_line(line_break: str, entries: list[str]) -> None:
    class Multiline(Exception):
        def __repr__(self) -> str:
            return f"one{line_break}two"

    logger.warning("%s %r %s", f"a{line_break}name", f"a{line_break}name", Multiline())

    (entry,) = entries
    assert len(entry.splitlines()) == 1
    assert entry.isprintable()


def test_a_plain_text_is_unchanged(entries: list[str]) -> None:
    logger.warning("%r of %s, %d times in %.1f s: %s", "h", "größe 日本", 3, 1.5, ValueError("no"))

    assert entries == ["WARNING 'h' of größe 日本, 3 times in 1.5 s: ValueError('no')"]


@pytest.mark.parametrize("make", DESCRIBED_BADLY, ids=name_of)
def test_every_error_can_be_logged_with_its_stack(make: Callable[[], BaseException], entries: list[str]) -> None:
    try:
        raise make()
    except BaseException as error:
        logger.error("it failed with %s at %s", error, location_of(error), exc_info=error)

    assert entries[0].startswith("ERROR it failed with ")


def test_the_text_of_an_error_adds_no_line_to_its_stack(entries: list[str]) -> None:
    try:
        try:
            raise LookupError(f"cause{FORGED}")
        except LookupError as cause:
            error = RuntimeError(f"text{FORGED}")
            error.add_note(f"note{FORGED}")
            raise error from cause
    except RuntimeError as caught:
        logger.error("it failed", exc_info=caught)

    (entry,) = entries
    lines = entry.splitlines()
    assert not any(line.startswith("2030-01-01") for line in lines)
    assert (
        sum("test_the_text_of_an_error_adds" in line for line in lines) == 2
    )  # the stack of the error, and of its cause
    assert any("RuntimeError('text" in line for line in lines)


def test_an_entry_names_its_source_line(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("here")

    (record,) = caplog.records
    assert (record.pathname, record.funcName) == (__file__, "test_an_entry_names_its_source_line")
    assert record.name == "outboxio.test_log"


def test_a_disabled_log_level_formats_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Dear(Exception):
        def __repr__(self) -> str:
            raise AssertionError

    caplog.set_level(logging.WARNING, logger="outboxio")
    logger.debug("%s", Dear())

    assert caplog.records == []


@pytest.mark.usefixtures("in_process")  # the first import of sentry_sdk sets up its log
def test_every_logger_of_the_package_sanitizes_its_entries() -> None:
    for module in pkgutil.walk_packages(outboxio.__path__, "outboxio."):
        if module.name.startswith("outboxio.cli"):
            continue
        found = getattr(importlib.import_module(module.name), "logger", None)
        assert found is None or isinstance(found, Log), module.name
    direct = [path.name for path in modules() if "logging.getLogger(__name__)" in text_of(path)]
    assert direct == []
    by_name = [path.name for path in modules() if re.search(r"getLogger\(", text_of(path))]
    assert sorted(by_name) == ["log.py", "logs.py"]


# --- values of payloads --------------------------------------------------------------------------


class Kind(enum.Enum):
    A = "a"


class Number(enum.Enum):
    A = 1


class Left(msgspec.Struct, tag=True):
    pass


class Right(msgspec.Struct, tag=True):
    pass


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind = Kind.A
    number: Number = Number.A
    sides: list[Left | Right] = []
    by_name: dict[str, Kind] = {}
    short: Annotated[str, msgspec.Meta(max_length=3)] = ""
    code: Annotated[str, msgspec.Meta(pattern="^[a-z]'?$")] = ""
    choice: bool = False


class Checked(msgspec.Struct):
    card: str

    def __post_init__(self) -> None:
        raise ValueError(f"no such card: {self.card}")


def refusal(document: object, kind: Any) -> BaseException:
    try:
        msgspec.json.decode(msgspec.json.encode(document), type=kind)
    except Exception as error:
        return error
    raise AssertionError("it decodes")


@pytest.mark.parametrize(
    ("document", "kind", "says"),
    [
        ({"kind": CARD}, Closed, "Invalid enum value - at `$.kind`"),
        ({"kind": f"'{CARD}' - at `$.forged`"}, Closed, "Invalid enum value - at `$.kind`"),
        ({"number": int(CARD)}, Closed, "Invalid enum value - at `$.number`"),
        ({"sides": [{"type": CARD}]}, Closed, "Invalid value - at `$.sides[0].type`"),
        ({"by_name": {CARD: CARD}}, Closed, "Invalid enum value - at `$.by_name[...]`"),
        ({CARD: 1}, Closed, "Object contains unknown field"),
        ({"short": CARD}, Closed, "Expected `str` of length <= 3 - at `$.short`"),
        ({"code": CARD}, Closed, "Expected `str` matching regex"),
        ({"choice": CARD}, Closed, "Expected `bool`, got `str` - at `$.choice`"),
        ({"card": CARD}, Checked, "rejected by a validator of its class"),
        ([{"card": CARD}], list[Checked], "rejected by a validator of its class - at `$[0]`"),
    ],
)
def test_a_decoding_error_names_path_and_type_but_no_value(document: object, kind: Any, says: str) -> None:
    error = refusal(document, kind)

    assert says in log_text(error)
    assert CARD not in log_text(error)
    assert log_text(error).startswith("ValidationError(")


def test_text_that_is_not_valid_unicode_is_truncated() -> None:
    with pytest.raises(UnicodeEncodeError) as refused:
        f"{CARD}\ud800".encode()

    assert CARD in repr(refused.value)
    assert CARD not in log_text(refused.value)
    assert "surrogates not allowed" in log_text(refused.value)


@pytest.mark.parametrize("value", [{"card": f"{CARD}\0"}, {f"{CARD}\0": 1}, [CARD], CARD, {CARD: float("nan")}])
def test_a_value_that_cannot_be_stored_is_not_logged(value: object) -> None:
    with pytest.raises(InvalidEvent) as refused:
        encode_object(value, "event Paid", stores_nul=False)

    assert CARD in str(refused.value)
    assert CARD not in log_text(refused.value)
    assert log_text(refused.value).startswith("InvalidEvent('event Paid: ")


def test_an_overlong_error_is_truncated() -> None:
    assert len(log_text(ValueError("\n" * 10_000_000))) == MAX_SHOWN
    assert len(log_text(ValueError("x" * 10_000_000))) == MAX_SHOWN


def test_an_error_whose_str_fails_is_named_on_one_line() -> None:
    odd = type(f"Odd{FORGED}", (Exception,), {"__repr__": lambda self: 1 / 0})

    assert log_text(odd()).startswith("<unprintable tests.unit.test_log.Odd")
    assert len(log_text(odd()).splitlines()) == 1
