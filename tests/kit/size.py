"""The size of a test: ``OUTBOXIO_FULL_SIZE=1`` runs the sizes of the documentation, which take minutes per database."""

from __future__ import annotations

import os

FULL = bool(os.environ.get("OUTBOXIO_FULL_SIZE"))
