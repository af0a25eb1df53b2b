"""What a model with sparse attention takes over a whole context is what was planned, in each form."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.options import EngineOptions, SamplingOptions, Spec, Switch
from tests.engine.test_fit import built, fill
from tests.tiny import Tiny, tokens, write_tiny

N_CTX = 2048
BUDGET = 128  # copies of chosen rows from 1024 cache rows on, before that a mask over all rows
DEPTHS = (20, 900, N_CTX - 60)  # where steps begin: in each form


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(architecture="qwen4exp", n_ctx_train=N_CTX, n_mtp=1, budget=BUDGET)
    return write_tiny(tmp_path_factory.mktemp("sparse"), tiny)


def note_forms(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A set that collects the forms of the forwards to come."""
    met, choose = set(), Forwards.form

    def noted(self: Forwards, n_past: int, n_tokens: int, n_kv: int) -> str:
        met.add(choose(self, n_past, n_tokens, n_kv))
        return choose(self, n_past, n_tokens, n_kv)

    monkeypatch.setattr(Forwards, "form", noted)
    return met


def some_steps(core: EngineCore, spec: Spec) -> None:
    """Decode a few tokens, with drafts if there are any."""
    if spec == "off":
        for token in tokens(4, seed=3):
            core.decode(core.slots[0], token)
        return
    speculation = core.speculation(Sampler(SamplingOptions(), (), n_vocab=264, forbidden=None), 4)
    assert speculation is not None
    assert len(list(islice(speculation.runs(core.slots[0], 5, core.n_ctx), 4))) == 4


@pytest.mark.parametrize(
    ("chunk", "flash_attn", "spec"),
    [(256, "off", "off"), (256, "on", "mtp"), (600, "auto", "mtp"), (32, "off", "mtp")],
)
def test_a_full_context_takes_what_was_planned(
    model: Path, chunk: int, flash_attn: Switch, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(
        model=model,
        max_ctx=N_CTX,
        chunk=chunk,
        flash_attn=flash_attn,
        spec=spec,
        device="CPU",
        threads=1,
        prefix_cache_max_mib=0,
    )
    with built(options) as (made, core, ledger):
        planned = dict(made.fit.devices[0].terms)
        met = note_forms(monkeypatch)
        fill(core, tokens(N_CTX, seed=1), 0)
        held = ledger.by_label("CPU")
        assert 0.9 * planned["graphs"] <= held["graphs"]
        later = {"draft graphs", "graph scratch"}  # not used by a prompt, or held by ggml itself
        whole, taken = (sum(n for label, n in x.items() if label not in later) for x in (planned, held))
        assert 0.9 * whole <= taken
        for depth in DEPTHS:
            fill(core, tokens(depth, seed=2), 0)
            some_steps(core, spec)
        assert met == {"dense", "masked", "gathered"}
        held = ledger.by_label("CPU")
        assert {label: n for label, n in held.items() if n > planned.get(label, 0)} == {}
        assert ledger.peak("CPU") <= sum(planned.values())


@pytest.mark.parametrize("flash_attn", ["off", "on"])
def test_batches_take_what_was_planned_in_each_form(model: Path, flash_attn: Switch) -> None:
    options = EngineOptions(
        model=model, max_ctx=N_CTX, slots=3, spec="off", flash_attn=flash_attn, device="CPU", threads=1
    )
    with built(options) as (made, core, ledger):
        planned, forwards = made.fit.devices[0].terms, core._forwards
        for depths in (DEPTHS, (N_CTX - 60,) * 3):
            for slot, depth in zip(core.slots, depths, strict=True):
                fill(core, tokens(depth, seed=slot.id), slot.id)
            for some in (core.slots, core.slots[:2], core.slots[1:], core.slots):
                forwards.decode_batch(some, tokens(len(some), seed=3))
        held = ledger.by_label("CPU")
        assert {label: n for label, n in held.items() if n > planned.get(label, 0)} == {}
        assert ledger.peak("CPU") <= sum(planned.values())
