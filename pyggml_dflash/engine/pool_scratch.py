"""What a GPU's scratch pools take, measured by running a prompt chunk at the end of the context. Layer 6.

ggml's allocator tells what a graph takes, but not what kernels take beside it from their pools. A plan
covers that with its headroom until the engine is there; then one real chunk says how much it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.prefill import Pools
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.plan.chunk import ChunkPlan
from pyggml_dflash.state.slot import RECENT_TOKENS, Slot

LABEL: Final = "pool scratch"
LEAST_LEFT: Final = 4  # of the headroom, the part that must be free behind the deepest chunk: one in so many


def measure_pools(forwards: Forwards, slot: Slot, pools: Pools) -> int:
    """Bytes that the pools hold after the last chunk of a full context; 0 unless a pool keeps its blocks.

    Runs that chunk and a decode step in an empty slot, and leaves the slot empty.
    """
    n = min(forwards.chunk, forwards.n_ctx - 1)
    slot.n_past = forwards.n_ctx - n - 1
    slot.recent = (0,) * min(slot.n_past, RECENT_TOKENS)
    own, forwards.recorded[slot.id] = forwards.recorded[slot.id], forwards.space.shared.first
    try:
        forwards.prefill(slot, (0,) * n, "last", capture=forwards.recording is not None)
        slot.commit(n)
        forwards.decode(slot, 0)
        stats = pools.stats()
        return stats.live_bytes + stats.cached_bytes if pools.has_legacy() else 0
    finally:
        forwards.recorded[slot.id] = own
        slot.reset()


def with_pools(plan: ChunkPlan, scratch: int, free: int) -> ChunkPlan:
    """The plan with measured scratch in place of that part of the headroom.

    `free`: bytes left on the device after the measurement; raises `DeviceMemoryError` where so little is left
    that a prompt of this length may not get through.
    """
    target, *others = plan.shares
    if free < target.headroom // LEAST_LEFT:
        raise DeviceMemoryError(
            what=f"a prompt of {plan.n_ctx} tokens",
            wanted=target.headroom // LEAST_LEFT,
            free=free,
            device=target.device,
        )
    terms = {**target.terms, LABEL: scratch} if scratch else target.terms
    measured = replace(target, terms=terms, headroom=max(0, target.headroom - scratch))
    return replace(plan, shares=(measured, *others))
