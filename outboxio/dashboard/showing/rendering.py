"""Static files and the rendering of views. A hash in a file's address lets browsers cache it without revalidation."""

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
    from outboxio.dashboard.page_request import PageRequest

HERE = Path(__file__).parents[1]
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PATH = "/static/{tag}/{name}"


def _read(path: Path) -> tuple[bytes, str]:
    body = path.read_bytes()
    return body, hashlib.sha256(body).hexdigest()[:16]


_FILES = {path.name: _read(path) for path in sorted((HERE / "static").iterdir()) if path.suffix in _KINDS}


def address(name: str) -> str:
    """Return the address of a file below the mount."""
    return f"/static/{_FILES[name][1]}/{name}"


async def answer(request: Request) -> Response:
    """Return the file, or 304 if the browser has it."""
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404)
    body, tag = _FILES[name]
    headers = {"etag": f'"{tag}"', "cache-control": "private, max-age=31536000, immutable"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_KINDS[Path(name).suffix])


# --- from a view to a response: HTML from a template, or JSON -------------------------------------


_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=visible,
    trim_blocks=True,
    lstrip_blocks=True,
)
_GLOBALS: dict[str, Any] = {
    "terms": shown, "spark": charts.spark, "bars": charts.bars, "lags": charts.lags, "explained": shown.explained,
    "version": __version__,
}  # fmt: skip
_environment.filters.update(FILTERS)
_environment.tests.update(TESTS)
_environment.globals.update(_GLOBALS)


async def rendered_response(view: View | Download, request: PageRequest) -> Response:
    """Return the response of a page: HTML, JSON for ``?format=json``, or a file to save."""
    if isinstance(view, Download):
        return _attachment(view)
    if request.query.get("format") == "json":
        return Response(as_json(view.facts), view.status, media_type="application/json")
    text = rendered(view, request, did=await _did(request))
    return Response(text.encode("utf-8", "replace"), view.status, media_type="text/html")


def rendered(view: View, request: PageRequest, did: Operation | None = None) -> str:
    """Return the HTML of a page. ``did``: the operation that was just run."""
    template = _environment.get_template(view.template)
    return template.render(facts=view.facts, view=view, request=request, access=request.access, did=did, **view.shown)


async def _did(request: PageRequest) -> Operation | None:
    """Return the operation whose id is in the query. No text from a URL is ever shown."""
    try:
        id = UUID(request.query.get("did", ""))
    except ValueError:
        return None
    return await request.admin.operation(id)


def _attachment(download: Download) -> Response:
    headers = {"content-disposition": f'attachment; filename="{download.name}"'}
    return Response(download.content, headers=headers, media_type=download.media_type)
