"""The pages and orders of the dashboard, one module for each page. A page is a line in ``PAGES``."""

from __future__ import annotations

from outboxio.dashboard.pages.glossary import glossary
from outboxio.dashboard.pages.overview import overview
from outboxio.dashboard.view import Order, Route

PAGES: list[Route] = [
    Route("overview", "/", overview),
    Route("glossary", "/glossary", glossary),
]

ORDERS: list[Order] = []
