"""Scratch is measured at the end of the context, leaves no trace, and is part of the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pyggml_dflash.engine.loader import Built
from pyggml_dflash.engine.pool_scratch import LABEL, measure_pools, with_pools
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.plan.chunk import ChunkPlan, DeviceShare
from tests.engine.test_fit import built
from tests.engine.test_trim import GIB, MIB, ScriptedPools
from tests.tiny import Tiny, tokens, write_tiny


@pytest.fixture(scope="module", params=["qwen35", "qwen4exp"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(architecture=request.param, n_ctx_train=1024, n_mtp=1)
    return write_tiny(tmp_path_factory.mktemp("scratch"), tiny)


def measured(made: Built, pools: ScriptedPools) -> int:
    return measure_pools(made.parts.forwards, made.parts.slots.slots[0], pools)


@pytest.mark.parametrize("slots", [1, 4])
def test_measuring_leaves_the_slot_as_it_was(model: Path, slots: int) -> None:
    found = []
    common = EngineOptions(model=model, max_ctx=1024, chunk=128, spec="mtp", device="CPU", threads=1)
    options = replace(common, slots=slots)
    for measures in (False, True):
        with built(options) as (made, core, _):
            if measures:
                assert measured(made, ScriptedPools(cached=5 * MIB, live=MIB)) == 6 * MIB
            slot = core.slots[0]
            logits = core.prefill(slot, tokens(100, seed=1), last=True)
            assert logits is not None
            found.append((logits.tolist(), core.decode(slot, 3).tolist()))
    assert found[0] == found[1]


def test_pools_that_give_pages_back_are_not_counted(model: Path) -> None:
    with built(EngineOptions(model=model, max_ctx=512, device="CPU", threads=1)) as (made, _, _):
        assert measured(made, ScriptedPools(legacy=False)) == 0


def plan(headroom: int) -> ChunkPlan:
    shares = (
        DeviceShare(device="CUDA0", available=8 * GIB, headroom=headroom, terms={"state": GIB}),
        DeviceShare(device="CPU", available=8 * GIB, headroom=MIB, terms={}),
    )
    return ChunkPlan(
        n_ctx=4096,
        chunk=256,
        available=8 * GIB,
        required=GIB,
        position_bytes=1,
        device="CUDA0",
        shares=shares,
    )


def test_what_was_measured_takes_the_place_of_headroom() -> None:
    target, host = with_pools(plan(400 * MIB), 30 * MIB, free=GIB).shares
    assert (target.terms[LABEL], target.headroom) == (30 * MIB, 370 * MIB)
    assert target.required == plan(400 * MIB).shares[0].required
    assert host == plan(400 * MIB).shares[1]


def test_scratch_beyond_the_headroom_is_required_in_full() -> None:
    target = with_pools(plan(400 * MIB), 900 * MIB, free=GIB).shares[0]
    assert target.required == GIB + 900 * MIB


def test_a_context_that_leaves_too_little_is_refused() -> None:
    with pytest.raises(DeviceMemoryError, match="CUDA0: no room for a prompt of 4096 tokens"):
        with_pools(plan(400 * MIB), 390 * MIB, free=99 * MIB)
    assert with_pools(plan(400 * MIB), 390 * MIB, free=100 * MIB).n_ctx == 4096
