"""The size of a test: ``OUTBOXIO_TEST_FULL_SIZE=1`` runs the documented sizes, which take minutes per database."""

from __future__ import annotations

import os

FULL = bool(os.environ.get("OUTBOXIO_TEST_FULL_SIZE"))
