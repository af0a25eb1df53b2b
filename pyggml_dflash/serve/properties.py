"""The body of /props: what was opened, how, and what it holds. Layer 8."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyggml_dflash import __version__
from pyggml_dflash.api import EngineInfo
from pyggml_dflash.options import Auto
from pyggml_dflash.requests import EngineStats
from pyggml_dflash.serve.desk import Totals
from pyggml_dflash.serve.service import Reading, Service
from pyggml_dflash.serve.settings import ServeOptions

SCHEMA: Final = 2


def properties(service: Service, reading: Reading) -> dict[str, Any]:
    """The body of /props; features that this engine does not have get no section."""
    engine, options = service.engine, service.options
    info, totals = engine.info, service.desk.totals
    report = {
        "build_info": f"pyggml-dflash {__version__}; props_schema={SCHEMA}",
        "model": _model(info),
        "model_alias": service.model_name,
        "model_path": info.model,
        "capabilities": _capabilities(info, reading),
        "daemon": {"alive": engine.alive},
        "default_generation_settings": _generation(info, options),
        "sampling": options.sampling,
        "budget_envelope": {
            "default_max_tokens": options.default_max_tokens,
            "reasoning_budget": options.reasoning_budget,
        },
        "reasoning": {"supported": info.reasoning_supported, "budget": options.reasoning_budget},
        "runtime": _runtime(service, reading),
        "memory": reading.memory,
        "memory_taken_s": reading.taken_s,
        "memory_plan": engine.fit_report(),
        "prefix_cache": _prefix_cache(service, reading),
        "parked": engine.parked,
        "speculative_mode": info.spec,
        "speculative": _speculation(info, totals),
        "totals": totals,
        "server": _server(service),
    }
    shown: dict[str, Any] = plain(report, whole_paths=options.show_paths)
    return shown


def _model(info: EngineInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "arch": info.architecture,
        "tokenizer_id": info.tokenizer,
        "n_vocab": info.n_vocab,
        "n_layer": info.n_layer,
        "n_ctx_train": info.n_ctx_train,
        "weight_bytes": info.weight_bytes,
        "draft": info.draft,
        "draft_path": None if info.draft is None else info.draft.path,
        "has_chat_template": info.has_chat_template,
        "chat_template_file": info.chat_template_file,
    }


def _capabilities(info: EngineInfo, reading: Reading) -> dict[str, bool]:
    """What a request may ask of this model and server."""
    return {
        "chat": info.has_chat_template,
        "tools": info.tools_supported,
        "reasoning": info.reasoning_supported,
        "structured_output": True,
        "logprobs": True,
        "logit_bias": True,
        "streaming": True,
        "images": False,
        "embeddings": False,
        "speculative": info.spec != "off",
        "prefix_cache": reading.stats.snapshots is not None,
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


def _server(service: Service) -> dict[str, Any]:
    options = service.options
    return {
        "model_names": service.model_names,
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
    return {
        "max_ctx": info.n_ctx,
        "chunk": info.chunk,
        "stream_experts": info.stream_rows,
        "granule": info.granule,
        "slots": service.desk.n_slots,
        "decode_mode": info.decode_mode,
        "decode_rows": info.decode_rows,
        "decode_reason": info.decode_reason,
        "joined_rows": info.joined_rows,
        "joined_reason": info.joined_reason,
        "backend": info.backend,
        "device": info.device,
        "devices": info.devices,
        "device_memory": reading.stats.devices,
        "split": info.split,
        "placement": info.placement,
        "threads": info.threads,
        "cache_type_k": info.cache_type_k,
        "cache_type_v": info.cache_type_v,
        "flash_attn": info.flash_attn,
        "pool": _pool(engine.options.trim_interval or 0, reading.stats),
        "fit": {
            "requested": engine.fit_report().requested,
            "trained": info.n_ctx_train,
            "fitted": info.n_ctx,
            "probes": len(engine.fit_report().trace),
        },
    }


def _pool(interval: int | Auto, stats: EngineStats) -> dict[str, Any]:
    """Scratch pools; `interval`: tokens of a prompt between two trims, 0 for none."""
    return {
        "kind": stats.pool.kind,
        "trim_strategy": stats.pool.trim_strategy,
        "interval": interval,
        "trims": sum(trim.n_trims for trim in stats.trims),
        "bytes": sum(trim.released_bytes for trim in stats.trims),
        "live_bytes": stats.pool.live_bytes,
        "cached_bytes": stats.pool.cached_bytes,
        "vmm_bytes": stats.pool.vmm_bytes,
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
        return str(value.absolute()) if whole_paths else value.name
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
