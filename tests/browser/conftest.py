"""Chromium without a window, and the site that it looks at."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from outboxio.dashboard import Access
from tests.kit.busy import fill
from tests.kit.site import Site, served

QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def administrator(request: object) -> Access:
    return Access.admin("ada@example.org")
