"""From a view to an answer: HTML by a template, or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import jinja2
from starlette.responses import Response

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.showing import charts, words
from outboxio.dashboard.showing.plain import as_json
from outboxio.dashboard.showing.shown import FILTERS, visible
from outboxio.dashboard.view import Download, View
from outboxio.model.operating.operation import Operation
from outboxio.version import __version__

HERE = Path(__file__).parents[1]

_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=visible,
    trim_blocks=True,
    lstrip_blocks=True,
)
_GLOBALS: dict[str, Any] = {
    "words": words, "spark": charts.spark, "bars": charts.bars, "explained": words.explained, "version": __version__
}  # fmt: skip
_environment.filters.update(FILTERS)
_environment.globals.update(_GLOBALS)


async def answered(view: View | Download, asked: Asked) -> Response:
    """The answer of a page: HTML, or JSON for ``?format=json``; or a file to save."""
    if isinstance(view, Download):
        return _attachment(view)
    if asked.query.get("format") == "json":
        return Response(as_json(view.facts), view.status, media_type="application/json")
    text = rendered(view, asked, did=await _did(asked))
    return Response(text.encode("utf-8", "replace"), view.status, media_type="text/html")


def rendered(view: View, asked: Asked, did: Operation | None = None) -> str:
    """The HTML of a page. ``did``: the order that was given just now."""
    template = _environment.get_template(view.template)
    return template.render(facts=view.facts, view=view, asked=asked, access=asked.access, did=did, **view.shown)


async def _did(asked: Asked) -> Operation | None:
    """The order of which the query has the id: no text of an address is ever shown."""
    try:
        id = UUID(asked.query.get("did", ""))
    except ValueError:
        return None
    return await asked.admin.operation(id)


def _attachment(download: Download) -> Response:
    headers = {"content-disposition": f'attachment; filename="{download.name}"'}
    return Response(download.content, headers=headers, media_type=download.media_type)
