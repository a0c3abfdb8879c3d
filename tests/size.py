"""How much of a test is run: ``OUTBOXIO_FULL_SIZE=1`` is for what is stated, which takes minutes for each database."""

from __future__ import annotations

import os

FULL = bool(os.environ.get("OUTBOXIO_FULL_SIZE"))
