"""What the server says of itself: /health, /props, /slots, /v1/models, /metrics. Layer 8."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Final, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import Field

from pyggml_dflash.requests import SlotInfo
from pyggml_dflash.serve.bodies import ResponseBody, json_response
from pyggml_dflash.serve.desk import Ticket
from pyggml_dflash.serve.documents import report_responses, responses
from pyggml_dflash.serve.properties import properties
from pyggml_dflash.serve.service import Reading, Service

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Health(ResponseBody):
    """200 when requests are answered, 503 while the model loads or is parked, and once the engine stopped."""

    status: Literal["ok", "loading", "parked", "stopped"]
    loaded_part: float = Field(description="Of the weights.")


class ModelBody(ResponseBody):
    """A model by one of its names, as OpenAI's clients read it and as Anthropic's do."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_model_len: int = Field(description="Context of a slot in tokens.")


class ModelList(ResponseBody):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]
    has_more: Literal[False]
    first_id: str
    last_id: str


class SlotBody(ResponseBody):
    """Room for one answer, and what is done there."""

    id: int
    state: Literal["free", "prefill", "decode"]
    request_id: str | None
    n_ctx: int
    n_past: int = Field(description="Tokens in its state, as far as is known.")
    n_prompt: int
    n_prefilled: int
    n_cached: int
    n_generated: int
    spec: str


class WaitingBody(ResponseBody):
    """An answer that waits for a slot; 1 is next."""

    position: int
    request_id: str
    n_prompt: int
    waiting_s: float


class SlotsBody(ResponseBody):
    """GET /slots."""

    slots: list[SlotBody]
    queue: list[WaitingBody]
    queue_limit: int


def report_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["reports"])

    @router.get("/health", responses={200: {"model": Health}, 503: {"model": Health}})
    async def health() -> Response:
        """Whether requests are answered."""
        if not service.is_ready:
            return json_response(Health(status="loading", loaded_part=service.loaded_part), 503)
        if not service.engine.alive:
            return json_response(Health(status="stopped", loaded_part=0.0), 503)
        if service.engine.parked:
            return json_response(Health(status="parked", loaded_part=0.0), 503)
        return json_response(Health(status="ok", loaded_part=1.0))

    @router.get("/v1/models", responses=report_responses(ModelList), tags=["OpenAI"])
    async def models() -> Response:
        """The model, once for each name it was given."""
        names = service.model_names
        found = [model_body(service, name) for name in names]
        return json_response(
            ModelList(object="list", data=found, has_more=False, first_id=names[0], last_id=names[-1])
        )

    @router.get("/v1/models/{name}", responses=responses(ModelBody, 400, 401, 403, 404, 503), tags=["OpenAI"])
    async def model(name: str) -> Response:
        """The model by one of its names."""
        service.check_model(name)
        return json_response(model_body(service, name))

    @router.get("/props", responses=report_responses(None))
    async def props(request: Request) -> Response:
        """What was opened, how, and what it holds."""
        reading = await service.read()
        return json_response({**properties(service, reading), "api": {"endpoints": endpoints(request.app)}})

    @router.get("/slots", responses=report_responses(SlotsBody))
    async def slots() -> Response:
        """What runs and what waits."""
        return json_response(slots_body(service, await service.read()))

    @router.get("/metrics", responses=metrics_responses())
    async def metrics() -> Response:
        """Counters and gauges in Prometheus' text form."""
        reading = await service.read()
        return Response(service.metrics.text(service, reading), headers={"content-type": METRICS_TYPE})

    return router


def metrics_responses() -> dict[int | str, dict[str, Any]]:
    """Text on success."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {**report_responses(None), 200: {"description": "Metrics.", "content": text}}


def model_body(service: Service, name: str) -> ModelBody:
    """One entry of the list."""
    return ModelBody(
        id=name,
        object="model",
        created=service.created,
        owned_by="pyggml-dflash",
        type="model",
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, timezone.utc).isoformat(),
        max_model_len=service.engine.info.n_ctx,
    )


def slots_body(service: Service, reading: Reading) -> SlotsBody:
    """Slots with the answers that run in them, and answers that wait."""
    desk, info = service.desk, service.engine.info
    slots, tickets = reading.stats.slots, _seated(reading.stats.slots, desk.running)
    waiting = [
        WaitingBody(
            position=i, request_id=ticket.request_id, n_prompt=ticket.n_prompt, waiting_s=ticket.age_s
        )
        for i, ticket in enumerate(desk.waiting, 1)
    ]
    return SlotsBody(
        slots=[_slot(slot, tickets.get(slot.id), info.n_ctx, info.spec) for slot in slots],
        queue=waiting,
        queue_limit=desk.queue_limit,
    )


def _seated(slots: Sequence[SlotInfo], running: Sequence[Ticket]) -> dict[int, Ticket]:
    """Which answer runs in which slot; one that began since the engine told is shown in a free one."""
    by_request = {slot.request: slot.id for slot in slots if slot.request is not None}
    seated = {by_request[t.engine_id]: t for t in running if t.engine_id in by_request}
    known = {ticket.number for ticket in seated.values()}
    free = [slot.id for slot in slots if slot.phase == "free"]
    return {**seated, **dict(zip(free, (t for t in running if t.number not in known), strict=False))}


def _slot(slot: SlotInfo, ticket: Ticket | None, n_ctx: int, spec: str) -> SlotBody:
    state = slot.phase if slot.phase != "done" else "free"
    if ticket is not None and ticket.state != "queued":
        state = ticket.state
    return SlotBody(
        id=slot.id,
        state=state,
        request_id=None if ticket is None else ticket.request_id,
        n_ctx=n_ctx,
        n_past=slot.n_past,
        n_prompt=0 if ticket is None else ticket.n_prompt,
        n_prefilled=0 if ticket is None else ticket.n_prefilled,
        n_cached=0 if ticket is None else ticket.n_cached or 0,
        n_generated=0 if ticket is None else ticket.n_generated,
        spec=spec,
    )


def endpoints(app: FastAPI) -> list[str]:
    """What may be asked: methods with their paths."""
    return [
        f"{method.upper()} {path}"
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    ]
