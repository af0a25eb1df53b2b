"""POST /admin/…: what changes the server itself. Layer 8.

`Guard` lets requests here pass with the API key, or from this machine where there is none.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Response
from pydantic import WithJsonSchema

from pyggml_dflash.openai.values import FLAG, record
from pyggml_dflash.serve.bodies import JsonRoute, Object, ResponseBody, json_response
from pyggml_dflash.serve.documents import responses
from pyggml_dflash.serve.service import Service

_PARK: Final = record(
    {"cancel": FLAG.about("End answers that run; if absent, they come to their own end first.")}
)
ParkBody = Annotated[Object, WithJsonSchema(dict(_PARK.schema))]


class Parked(ResponseBody):
    """Whether the model's memory was given back."""

    parked: bool


class Trimmed(ResponseBody):
    """What a trim gave back to the driver."""

    released_bytes: int


def admin_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/admin", tags=["admin"], route_class=JsonRoute)

    @router.post("/trim", responses=responses(Trimmed, 401, 403, 413, 500, 503))
    async def trim() -> Response:
        """Give cached blocks of scratch pools back to the driver, once the engine comes to it."""
        return json_response(Trimmed(released_bytes=await service.trim()))

    @router.post("/park", responses=responses(Parked, 400, 401, 403, 413, 500, 503))
    async def park(body: ParkBody | None = None) -> Response:
        """Give the model's memory back; until it is unparked, requests are refused with 503."""
        found = {} if body is None else body
        _PARK.check("", found)
        await service.park(cancel=bool(found.get("cancel")))
        return json_response(Parked(parked=service.engine.parked))

    @router.post("/unpark", responses=responses(Parked, 401, 403, 413, 500, 503))
    async def unpark() -> Response:
        """Load the model again, with the context it had."""
        await service.unpark()
        return json_response(Parked(parked=service.engine.parked))

    return router
