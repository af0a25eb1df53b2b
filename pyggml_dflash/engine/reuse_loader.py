"""From a planned engine to its stored states: limits, folder, and what their numbers depend on. Layer 6."""

from __future__ import annotations

import hashlib

from pyggml_dflash.engine.assembly import Blueprint, has_tiles, plain_kv
from pyggml_dflash.engine.reuse import Reuse, StoreLimits
from pyggml_dflash.ggml.device import backend_features, ggml_version
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.padding import MOST_PADDED, Paddings
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.state.fingerprint import Digest, fingerprint, model_identity
from pyggml_dflash.state.slot import SlotTable


def open_reuse(
    blueprint: Blueprint,
    slots: SlotTable,
    ledger: Ledger,
    *,
    limit: int,
    rows: int,
    paddings: Paddings,
    kept: Reuse | None,
) -> Reuse | None:
    """The stored states of an engine; None if its options want none. Whoever calls closes it.

    `limit`: most bytes in memory; `rows`: most of a prompt's forward; `paddings`: of its products. `kept` has
    those of the same engine before it was parked; if anything that numbers depend on is another now, they are
    let go.
    """
    if not blueprint.options.stores_states:
        return None
    mark = _fingerprint(blueprint, slots, rows, paddings)
    if kept is not None and kept.fingerprint == mark:
        kept.limit(limit)
        return kept
    if kept is not None:
        kept.close()
    return Reuse(ledger, _limits(blueprint.options, limit), fingerprint=mark)


def _limits(options: EngineOptions, limit: int) -> StoreLimits:
    return StoreLimits(
        n_bytes=limit,
        n_entries=options.prefix_cache_entries,
        pinned=options.snapshot_memory == "pinned",
        folder=options.kv_cache_dir,
        folder_bytes=options.kv_cache_budget * 2**20,
        min_tokens=options.kv_cache_min_tokens,
    )


def _fingerprint(blueprint: Blueprint, slots: SlotTable, rows: int, paddings: Paddings) -> Digest:
    """Everything that a state's numbers depend on, beside its tokens."""
    backend, file = blueprint.backend, blueprint.file
    own = {spec.name for spec in blueprint.architecture.tensors(blueprint.config, file)}  # not a drafter's
    kinds = hashlib.blake2b(digest_size=16)
    for placement in sorted(blueprint.placements, key=lambda placement: placement.name):
        if placement.name in own:
            kinds.update(f"{placement.name} {placement.kind} {placement.device};".encode())
    settings: dict[str, object] = {
        "devices": [(b.name, b.info.description) for b in backend.all],
        "homes": [blueprint.home(t.name).name for t in slots.layout.tensors],
        "features": sorted((name, sorted(found.items())) for name, found in backend_features().items()),
        "ggml": ggml_version(),
        "threads": backend.n_threads,
        "flash_attn": blueprint.flash_attn,
        "plain_kv": plain_kv(blueprint.options, backend),
        "tiles": has_tiles(blueprint.options, backend),
        "rows": rows,
        "stream_rows": blueprint.streaming.rows,
        "streams": repr(blueprint.streams),
        "half_links": backend.half_links,
        "hot": None if blueprint.hot is None else blueprint.hot.layers,  # on other kernels than where all are
        "paddings": _padded(paddings),
        "placement": kinds.hexdigest(),
    }
    return fingerprint(model_identity(file), slots.layout, settings)


def _padded(paddings: Paddings) -> list[object]:
    """What short forwards are made of, and how short."""
    found: list[object] = [*sorted(map(repr, paddings.kinds.items())), paddings.others]
    return [*found, MOST_PADDED] if paddings else found
