"""The files of ``static/``: style sheet, script and icon. A hash in the address lets browsers keep a file for ever."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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
