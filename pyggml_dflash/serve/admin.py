"""POST /admin/…: what changes the server itself. Layer 8.

`Guard` lets requests here pass with the API key, or from this machine where there is none.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from pyggml_dflash.serve.bodies import ResponseBody, json_response
from pyggml_dflash.serve.documents import responses
from pyggml_dflash.serve.service import Service


class Trimmed(ResponseBody):
    """What a trim gave back to the driver."""

    released_bytes: int


def admin_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.post("/trim", responses=responses(Trimmed, 401, 403, 413, 500, 503))
    async def trim() -> Response:
        """Give cached blocks of scratch pools back to the driver, once the engine comes to it."""
        return json_response(Trimmed(released_bytes=await service.trim()))

    return router
