"""How much memory stored states may take: a part of the plan where they lie on the device. Layer 6.

There a context that is to be found leaves room for one whole state per slot, and once it is found, states
may take what else is left over, up to the limit. A context that is given as a number comes first, whatever is
left for states. In system memory beside a GPU the limit alone counts.
"""

from __future__ import annotations

from dataclasses import replace

from pyggml_dflash.engine.assembly import Assembly, Blueprint, Settings
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.plan.chunk import ChunkPlan
from pyggml_dflash.state.prefix_match import FLOOR_BYTES, automatic_limit
from pyggml_dflash.state.snapshot import LABEL, snapshot_place
from pyggml_dflash.state.strips import layout_strips, snapshot_bytes


def full_state_bytes(settings: Settings, parts: Assembly) -> int:
    """What a stored state of a whole context takes, the drafter's part included."""
    n = settings.n_ctx
    more = parts.drafters[0].parts(n) if parts.drafters else ()
    return snapshot_bytes([*layout_strips(settings.layout, n), *(part.strip for part in more)], n)


def reserved_bytes(blueprint: Blueprint, state_bytes: int) -> int:
    """What a search for a context leaves to states on the device that computes."""
    options = blueprint.options
    if not _on_device(blueprint) or not options.stores_states:
        return 0
    wanted = options.slots * state_bytes
    most = options.prefix_cache_max_mib
    return wanted if isinstance(most, str) else min(wanted, most * 2**20)


def with_snapshots(blueprint: Blueprint, plan: ChunkPlan) -> tuple[ChunkPlan, int]:
    """The plan with room for stored states in what it left over, and the most bytes that they may take."""
    options = blueprint.options
    if not options.stores_states:
        return plan, 0
    target, *others = plan.shares
    if not _on_device(blueprint):
        available = others[0].available if others else target.available
        return plan, _wanted(options, plan.snapshot_bytes, available)
    room = max(0, target.balance + target.terms.get(LABEL, 0))
    limit = min(_wanted(options, plan.snapshot_bytes, target.available, floor_bytes=0), room)
    target = replace(target, terms={**target.terms, LABEL: limit})
    return replace(plan, shares=(target, *others)), limit


def _wanted(
    options: EngineOptions, state_bytes: int, available: int, *, floor_bytes: int = FLOOR_BYTES
) -> int:
    most = options.prefix_cache_max_mib
    if not isinstance(most, str):
        return most * 2**20
    return automatic_limit(state_bytes, options.slots, available, floor_bytes=floor_bytes)


def _on_device(blueprint: Blueprint) -> bool:
    return snapshot_place(blueprint.backend.info.kind) == "device"
