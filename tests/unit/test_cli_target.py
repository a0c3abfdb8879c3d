"""The target of the command line: code that exits during its import or call is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from outboxio.cli.target import Named, TargetError, opened

EXITS = {
    "at import": ("import sys\nsys.exit(3)", "outbox", r"importing {name} failed: the code called sys\.exit\(3\)"),
    "with a text": ("raise SystemExit('no config')", "outbox", r"importing {name} failed: .*sys\.exit\('no config'\)"),
    "without a code": ("import sys\nsys.exit()", "outbox", r"importing {name} failed: the code called sys\.exit\(\)"),
    "in a function": ("def make(): raise SystemExit(3)", "make", r"calling {name}:make\(\) failed: .*sys\.exit\(3\)"),
    "in a coroutine": ("async def make(): exit(0)", "make", r"calling {name}:make\(\) failed: .*sys\.exit\(0\)"),
    "by another": ("class E(BaseException): pass\nraise E('x')", "outbox", r"importing {name} failed: E: x"),
}  # fmt: skip


@pytest.mark.parametrize("case", EXITS)
async def test_a_target_that_ends_the_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    code, attribute, expected = EXITS[case]
    name = f"target_{case.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(TargetError, match=expected.format(name=name)):
        async with opened(Named(f"{name}:{attribute}", None, [])):
            pass


async def test_an_interrupted_import_is_not_an_error_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target_interrupted.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(KeyboardInterrupt):
        async with opened(Named("target_interrupted:outbox", None, [])):
            pass
