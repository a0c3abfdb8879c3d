"""A bootstrap whose process is killed during writes builds read models that equal the table.

``python -m tests.flow.bootstrap_course URL`` runs the same at full size.
"""

from __future__ import annotations

import pytest

from tests.flow.bootstrap_course import run_course

pytestmark = pytest.mark.slow


async def test_after_a_kill_a_bootstrapped_read_model_equals_its_table(database_url: str) -> None:
    course = await run_course(database_url, number=600, rate=30, kills=2, silence=1, chunk=50)

    assert course.ordered == course.expected
    assert course.versioned == course.expected
    assert min(course.done) >= len(course.expected) // 2
