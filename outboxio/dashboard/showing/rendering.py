"""The files of ``static/``: style sheet, script and icon. A hash in the address lets browsers keep a file for ever."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import jinja2
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from outboxio.dashboard.showing import charts, shown
from outboxio.dashboard.showing.shown import FILTERS, TESTS, as_json, visible
from outboxio.dashboard.view import Download, View
from outboxio.model.operating.operation import Operation
from outboxio.version import __version__

if TYPE_CHECKING:
    from outboxio.dashboard.asked import Asked

HERE = Path(__file__).parents[1]
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PATH = "/static/{tag}/{name}"


def _read(path: Path) -> tuple[bytes, str]:
    body = path.read_bytes()
    return body, hashlib.sha256(body).hexdigest()[:16]


_FILES = {path.name: _read(path) for path in sorted((HERE / "static").iterdir()) if path.suffix in _KINDS}


def address(name: str) -> str:
    """The address of a file below the mount."""
    return f"/static/{_FILES[name][1]}/{name}"


async def answer(request: Request) -> Response:
    """The file, or 304 if the browser has the file."""
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404)
    body, tag = _FILES[name]
    headers = {"etag": f'"{tag}"', "cache-control": "private, max-age=31536000, immutable"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_KINDS[Path(name).suffix])


# --- from a view to an answer: HTML by a template, or JSON ----------------------------------------


_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=visible,
    trim_blocks=True,
    lstrip_blocks=True,
)
_GLOBALS: dict[str, Any] = {
    "words": shown, "spark": charts.spark, "bars": charts.bars, "lags": charts.lags, "explained": shown.explained,
    "version": __version__,
}  # fmt: skip
_environment.filters.update(FILTERS)
_environment.tests.update(TESTS)
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
