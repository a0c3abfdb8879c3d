"""The shared parts of property tests: the number of examples, and the values that break code most often.

Every run tries the same examples, so a failure comes back by running the test again.
``OUTBOXIO_TEST_PROPERTY_EXAMPLES=2000`` tries so many examples per property, new examples each time; a failure then
prints a ``@reproduce_failure`` line that repeats the failure.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = os.environ.get("OUTBOXIO_TEST_PROPERTY_EXAMPLES", "")

#: A test's share of the requested examples, where each example takes long.
SLOW = int(EXAMPLES or 60) // 4


def use_profile() -> None:
    """How all property tests of this run are run."""
    settings.register_profile(
        "outboxio",
        max_examples=int(EXAMPLES or 60),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,  # the load of the machine is not a property of the code
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("outboxio")


#: Characters that every database and JSON can hold.
storable = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
#: Text of such characters, with those that a layer may treat as syntax.
text = st.text(storable | st.sampled_from("\\\"'%{}/~\n\x01\u2028\U0001f600ß"), max_size=60)
#: Any Python string: with NUL, and with halves of surrogate pairs.
any_text = st.text(st.characters() | st.sampled_from("\0\ud800\udfff"), max_size=60)
#: Names that a name column can hold.
names = st.text(storable, min_size=1, max_size=255).filter(lambda name: name.strip())

#: Numbers that JSON and msgspec give back unchanged.
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)


def json_values(strings: st.SearchStrategy[str], floats: st.SearchStrategy[Any] = numbers) -> st.SearchStrategy[Any]:
    """JSON values, with the given strings and numbers anywhere, as keys too."""
    return st.recursive(
        st.none() | st.booleans() | floats | strings,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
        max_leaves=12,
    )


def json_objects(strings: st.SearchStrategy[str], floats: st.SearchStrategy[Any] = numbers) -> st.SearchStrategy[Any]:
    """The same, as an object."""
    return st.dictionaries(strings, json_values(strings, floats), max_size=5)
