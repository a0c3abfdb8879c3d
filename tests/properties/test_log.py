"""Any text becomes one line of the log."""

from __future__ import annotations

from hypothesis import example, given

from outboxio.support.log import one_line
from tests.kit.properties import any_text


@given(any_text)
@example("\ud800\udfff")
@example("\u2028")
def test_any_text_becomes_one_line(text: str) -> None:
    line = one_line(text)

    assert line.isprintable()
    assert len(line.splitlines()) <= 1
    line.encode()
    assert line == text or not text.isprintable()
