"""GET /: a page that shows what the engine does, and a chat. Layer 8.

One file without a build step. Its script and its style are the only ones that a browser may run there, so
that text of a model or a request stays text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response

from pyggml_dflash.serve.service import Service

FILE: Final = Path(__file__).with_name("page.html")


def page_routes(service: Service) -> APIRouter:
    """The route; the page asks the other ones like any client."""
    router = APIRouter(include_in_schema=False)
    page = FILE.read_bytes()
    headers = {"Content-Security-Policy": policy(page.decode()), "Cache-Control": "no-cache"}

    @router.get("/")
    async def index() -> Response:
        return Response(page, headers=headers, media_type="text/html")

    return router


def policy(page: str) -> str:
    """What a browser may load for the page: what is in it, and answers of this server."""
    script, style = (_hash(_inner(page, element)) for element in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _inner(page: str, element: str) -> str:
    """The text of the only such element."""
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return str(text)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
