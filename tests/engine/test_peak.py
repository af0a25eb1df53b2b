"""B07: slots share one set of buffers for prompt chunks, and the peak is the plan's, within 2 %."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pyggml_dflash import fit_report
from pyggml_dflash.arch.tiled import TILE_ROWS
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.graph_cache import GraphCache
from pyggml_dflash.engine.inputs import BUCKET
from pyggml_dflash.engine.joined_prompts import PromptRows
from pyggml_dflash.ggml.graph import StepGraph, measure_scratch
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.options import EngineOptions, Spec
from tests.engine.test_fit import built, fill, speculate
from tests.tiny import Tiny, tokens, write_tiny

N_CTX = 1024
N_SLOTS = 4
TAIL = N_CTX - 128 + TILE_ROWS - 1  # a prompt whose last chunk takes most


@pytest.fixture(scope="module", params=["llama", "qwen35", "qwen35moe", "qwen4exp"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(architecture=request.param, n_ctx_train=N_CTX)
    tiny = Tiny(architecture=request.param, n_ctx_train=N_CTX, n_mtp=int(tiny.has_delta_nets))
    return write_tiny(tmp_path_factory.mktemp("peak"), tiny)


def note_scratch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that collects what graphs that are made from now on ask of ggml beside their memory."""
    found: list[int] = []
    once = GraphCache.once

    def noted(self: GraphCache, builder: GraphBuilder, outputs: tuple[Tensor, ...]) -> StepGraph:
        found.append(measure_scratch(self._backend, builder)["CPU"])
        return once(self, builder, outputs)

    monkeypatch.setattr(GraphCache, "once", noted)
    return found


def join(core: EngineCore, *sizes: int) -> None:
    """Run the last rows of prompts that end with the context in one forward."""
    slots = core.slots[: len(sizes)]
    for slot, n in zip(slots, sizes, strict=True):
        slot.reset()
        slot.n_past = N_CTX - n
    prompts = [
        PromptRows(slot, tokens(n, seed=n), "last", False) for slot, n in zip(slots, sizes, strict=True)
    ]
    core._forwards.prefill_together(prompts)
    for slot in slots:
        slot.reset()
        fill(core, tokens(N_CTX - 20, seed=slot.id), slot.id)


def test_four_long_prompts_take_what_was_planned(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ggml keeps for itself to work in is no buffer of ours: the plan counts it, the ledger does not."""
    spec: Spec = "off" if model.stem == "llama" else "mtp"
    options = EngineOptions(
        model=model,
        max_ctx=N_CTX,
        slots=N_SLOTS,
        spec=spec,
        chunk=128,
        prefix_cache_max_mib=0,
        device="CPU",
        threads=1,
    )
    with built(options) as (made, core, ledger):
        planned = {name: n for name, n in made.fit.devices[0].terms.items() if n}
        scratch = note_scratch(monkeypatch)
        graphs = set()
        for slot in core.slots:
            for n in (TAIL, N_CTX - 20):  # a tail with the largest mask, and one that decoding follows
                fill(core, tokens(n, seed=slot.id), slot.id)
            graphs.add(ledger.by_label("CPU")["graphs"])
        assert len(graphs) == 1  # the first slot's chunks took all the memory that any slot's do
        if core._forwards.why_prompts_run_alone is None:
            join(core, TILE_ROWS - 1, 1)
        core._forwards.decode_batch(
            core.slots, [7] * N_SLOTS, capture=range(N_SLOTS) if spec == "mtp" else ()
        )
        for slot in core.slots:
            slot.commit(1)
        if spec == "mtp":
            core._forwards.verify_ragged(core.slots, [[7] * 4] * N_SLOTS)
        core.decode(core.slots[3], 7)
        if spec == "mtp":
            fill(core, tokens(N_CTX - 20, seed=9), 0)
            speculate(core, 0, width=4)
        core.logits(tokens(N_CTX, seed=3))
        whole = sum(planned.values())
        assert 0.98 * whole <= ledger.peak("CPU") + max(scratch) <= whole
        counted = {label: n for label, n in ledger.by_label("CPU").items() if label in planned}
        assert set(planned) - set(counted) == {"graph scratch"}
        assert max(scratch) <= planned["graph scratch"]


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_reading_a_text_with_the_logits_of_every_row_takes_what_was_planned(
    architecture: str, tmp_path: Path
) -> None:
    """The plan's own bytes are the cap, and a vocabulary is far wider than everything else."""
    tiny = Tiny(architecture=architecture, n_ctx_train=N_CTX, n_vocab=30_000, n_layer=2)
    options = EngineOptions(
        model=write_tiny(tmp_path, tiny), spec="off", prefix_cache_max_mib=0, device="CPU", threads=1
    )
    cap = sum(fit_report(options).devices[0].terms.values())
    with built(replace(options, device_cap={"CPU": cap}, fit_margin="0")) as (_, core, ledger):
        assert len(core.logits(tokens(N_CTX, seed=3))) == N_CTX
        if core.moe is not None:
            assert sum(len(chosen[0]) for chosen in core.picks(tokens(N_CTX, seed=3))) == N_CTX
        assert 0.95 * cap <= ledger.peak("CPU") <= cap


def test_prompts_that_go_row_by_row_take_the_scratch_that_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows over the first cache rows attend with flash attention, those behind them without."""
    path = write_tiny(tmp_path, Tiny(architecture="llama", n_ctx_train=N_CTX))
    options = EngineOptions(model=path, chunk=1, max_ctx=2 * BUCKET, device="CPU", threads=2)
    with built(options) as (made, core, _):
        scratch = note_scratch(monkeypatch)
        fill(core, tokens(BUCKET + 8, seed=1), 0)
        assert 0 < max(scratch) == made.fit.devices[0].terms["graph scratch"]
