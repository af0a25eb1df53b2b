"""What the server says of itself: /health, /props, /slots, /v1/models, /metrics. Layer 8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import Field

from pyggml_dflash import __version__
from pyggml_dflash.api import EngineInfo
from pyggml_dflash.requests import SlotInfo
from pyggml_dflash.serve.bodies import ResponseBody, json_response
from pyggml_dflash.serve.desk import Ticket, Totals
from pyggml_dflash.serve.documents import report_responses, responses
from pyggml_dflash.serve.service import Reading, Service
from pyggml_dflash.serve.settings import ServeOptions

SCHEMA: Final = 2  # of /props
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Health(ResponseBody):
    """200 when requests are answered, 503 while the model loads or is parked."""

    status: Literal["ok", "loading", "parked"]
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


def properties(service: Service, reading: Reading) -> dict[str, Any]:
    """The body of /props; sections whose feature is off are left out, not made up."""
    engine, options = service.engine, service.options
    info, totals = engine.info, service.desk.totals
    report = {
        "build_info": f"pyggml-dflash {__version__}; props_schema={SCHEMA}",
        "model": _model(info),
        "model_alias": list(options.model_names),
        "model_path": info.model,
        "default_generation_settings": _generation(info, options),
        "reasoning": {"supported": info.reasoning_supported},
        "runtime": _runtime(service, reading),
        "memory": reading.memory,
        "memory_taken_s": reading.taken_s,
        "memory_plan": engine.fit_report(),
        "prefix_cache": _prefix_cache(service, reading),
        "parked": engine.parked,
        "speculative_mode": info.spec,
        "speculative": _speculation(info, totals),
        "totals": totals,
        "server": _server(options),
    }
    shown: dict[str, Any] = plain(report, whole_paths=options.show_paths)
    return shown


def endpoints(app: FastAPI) -> list[str]:
    """What may be asked: methods with their paths."""
    return [
        f"{method.upper()} {path}"
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    ]


def _model(info: EngineInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "arch": info.architecture,
        "n_vocab": info.n_vocab,
        "n_layer": info.n_layer,
        "n_ctx_train": info.n_ctx_train,
        "weight_bytes": info.weight_bytes,
        "draft": info.draft,
        "has_chat_template": info.has_chat_template,
    }


def _prefix_cache(service: Service, reading: Reading) -> dict[str, Any]:
    totals, stored = service.desk.totals, reading.stats.snapshots
    return {
        "capacity": 0 if stored is None else service.engine.options.prefix_cache_entries,
        "in_use": 0 if stored is None else stored.n_states,
        "lifetime_hits": totals.cache_hits,
        "cached_tokens": totals.cached_tokens,
        "stored": stored,
    }


def _generation(info: EngineInfo, options: ServeOptions) -> dict[str, Any]:
    sampling = options.sampling
    return {
        "n_ctx": info.n_ctx,
        "max_tokens": options.default_max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed,
    }


def _speculation(info: EngineInfo, totals: Totals) -> dict[str, Any]:
    return {
        "reason": info.spec_reason,
        "verify_steps": totals.verify_steps,
        "drafted": totals.drafted,
        "accepted": totals.accepted,
        "acceptance_length": 1 + totals.accepted / totals.verify_steps if totals.verify_steps else None,
    }


def _server(options: ServeOptions) -> dict[str, Any]:
    return {
        "queue_limit": options.queue_limit,
        "max_body_bytes": options.max_body_bytes,
        "max_messages": options.max_messages,
        "max_choices": options.max_choices,
        "api_key": options.api_key is not None,
        "cors_origins": list(options.cors_origins),
    }


def _runtime(service: Service, reading: Reading) -> dict[str, Any]:
    engine = service.engine
    info = engine.info
    trims = reading.stats.trims
    return {
        "max_ctx": info.n_ctx,
        "chunk": info.chunk,
        "stream_experts": info.stream_rows,
        "granule": info.granule,
        "slots": service.desk.n_slots,
        "decode_mode": info.decode_mode,
        "decode_rows": info.decode_rows,
        "decode_reason": info.decode_reason,
        "device": info.device,
        "devices": info.devices,
        "split": info.split,
        "placement": info.placement,
        "threads": info.threads,
        "cache_type_k": info.cache_type_k,
        "cache_type_v": info.cache_type_v,
        "flash_attn": info.flash_attn,
        "pool": {
            "interval": engine.options.trim_interval,
            "trims": sum(trim.n_trims for trim in trims),
            "bytes": sum(trim.released_bytes for trim in trims),
        },
        "fit": {
            "requested": engine.fit_report().requested,
            "trained": info.n_ctx_train,
            "fitted": info.n_ctx,
            "probes": len(engine.fit_report().trace),
        },
    }


def plain(value: Any, *, whole_paths: bool) -> Any:
    """`value` in the types that JSON has; a path is its last part unless whole ones are wanted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name), whole_paths=whole_paths) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item, whole_paths=whole_paths) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, whole_paths=whole_paths) for item in value]
    if isinstance(value, Path):
        return str(value) if whole_paths else value.name
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
