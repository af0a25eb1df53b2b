"""What every architecture keeps: how a sequence is cut, and what ran before, never shows in its logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.arch.base import GraphKey, OutputKind
from pyggml_dflash.engine.forward import build_forward
from pyggml_dflash.engine.graphs import BUCKET, Inputs
from pyggml_dflash.ggml.arena import read_bytes
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.state.slot import Slot
from tests.reference.opened import Floats, OnOff, Parts, assembled, continued, on_the_cpu, open_core
from tests.tiny import Tiny, tokens, write_tiny

# One row and many are summed in another order. Logits have a standard deviation of 1; 4e-6 was measured.
ROUNDING = 3e-5

IDS = tokens(300, seed=11)  # goes beyond the first 256 cache rows


def models() -> dict[str, Tiny]:
    """Each architecture; hybrids with a delta net as the last layer too."""
    found = {name: Tiny(architecture=name) for name in sorted(ARCHITECTURES)}
    for name, tiny in list(found.items()):
        if tiny.has_delta_nets:
            found[f"{name}-delta-net-last"] = replace(tiny, n_layer=3)
    return found


MODELS = models()


@pytest.fixture(scope="module", params=list(MODELS))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("contract"), tiny)


@pytest.fixture(scope="module", params=["on", "off"])
def flash_attn(request: pytest.FixtureRequest) -> OnOff:
    return "on" if request.param == "on" else "off"


@pytest.fixture(scope="module")
def whole(model: Path, flash_attn: OnOff) -> Floats:
    """Logits of all tokens, run as one chunk."""
    with open_core(on_the_cpu(model, chunk=512, flash_attn=flash_attn)) as core:
        return core.logits(IDS)


@pytest.mark.parametrize("chunk", [1, 7, 64, 255, 256, 299])
def test_logits_do_not_depend_on_the_chunk_size(
    model: Path, flash_attn: OnOff, whole: Floats, chunk: int
) -> None:
    with open_core(on_the_cpu(model, chunk=chunk, flash_attn=flash_attn)) as core:
        np.testing.assert_allclose(core.logits(IDS), whole, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("n_prompt", [1, 100, 240, 256])
def test_a_decoded_token_has_the_logits_of_a_prompt_token(
    model: Path, flash_attn: OnOff, whole: Floats, n_prompt: int
) -> None:
    ids = IDS[: n_prompt + 40]
    with open_core(on_the_cpu(model, flash_attn=flash_attn)) as core:
        found = np.array(list(continued(core, ids[:n_prompt], ids[n_prompt:])))
    np.testing.assert_allclose(found, whole[n_prompt - 1 : len(ids) - 1], rtol=0, atol=ROUNDING)


def test_the_number_of_threads_does_not_show(model: Path, flash_attn: OnOff, whole: Floats) -> None:
    with open_core(on_the_cpu(model, chunk=512, flash_attn=flash_attn, threads=3)) as core:
        np.testing.assert_allclose(core.logits(IDS), whole, rtol=0, atol=ROUNDING)


def test_a_second_request_runs_as_in_a_fresh_process(model: Path, flash_attn: OnOff) -> None:
    options = on_the_cpu(model, flash_attn=flash_attn)
    first, second = IDS, tokens(40, seed=12)
    with open_core(options) as core:
        expected = list(continued(core, second[:30], second[30:]))
    with open_core(options) as core:
        before = list(continued(core, first[:250], first[250:]))
        core.logits(first)
        for _ in range(2):
            np.testing.assert_array_equal(list(continued(core, second[:30], second[30:])), expected)
        np.testing.assert_array_equal(list(continued(core, first[:250], first[250:])), before)


def run(parts: Parts, slot: Slot, ids: list[int], output: OutputKind) -> Floats | None:
    """One forward, committed."""
    logits = parts.forwards.prefill(slot, ids, output)
    slot.commit(len(ids))
    return logits


def state_bytes(parts: Parts, slot: Slot) -> dict[str, bytes]:
    """What the slot's part of every state tensor holds."""
    return {
        t.name: read_bytes(parts.slots.tensors[t.name], slot.id * t.n_bytes, t.n_bytes)
        for t in parts.slots.layout.tensors
    }


def test_the_output_asked_for_changes_neither_state_nor_last_row(
    model: Path, flash_attn: OnOff, whole: Floats
) -> None:
    with assembled(on_the_cpu(model, flash_attn=flash_attn), n_slots=3) as parts:
        states = []
        for slot, output in zip(parts.slots.slots, ("none", "last", "all"), strict=True):
            logits = run(parts, slot, IDS[:40], output)  # type: ignore[arg-type]
            states.append(state_bytes(parts, slot))
            if output == "none":
                assert logits is None
                continue
            assert logits is not None
            assert logits.shape == (1 if output == "last" else 40, whole.shape[1])
            np.testing.assert_allclose(logits[-1], whole[39], rtol=0, atol=ROUNDING)
            logits = run(parts, slot, IDS[40:50], "all")
            assert logits is not None
            np.testing.assert_allclose(logits, whole[40:50], rtol=0, atol=ROUNDING)
        assert states[0] == states[1] == states[2]


def test_slots_do_not_see_each_other(model: Path, flash_attn: OnOff) -> None:
    texts = [tokens(61, seed=seed) for seed in (13, 14, 15)]
    options = on_the_cpu(model, max_ctx=256, flash_attn=flash_attn)
    alone, after = [], []
    for ids in texts:
        with assembled(options, n_slots=3) as parts:
            alone.append(steps(parts, [parts.slots.slots[1]], [ids])[0])
            after.append(parts.forwards.decode(parts.slots.slots[1], ids[60]).copy())
    with assembled(options, n_slots=3) as parts:
        first, second, third = parts.slots.slots
        np.testing.assert_array_equal(steps(parts, [first, second, third], texts), alone)
        second.reset()
        np.testing.assert_array_equal(parts.forwards.decode(first, texts[0][60]), after[0])
        np.testing.assert_array_equal(parts.forwards.decode(third, texts[2][60]), after[2])
        np.testing.assert_array_equal(steps(parts, [second], [texts[0]])[0], alone[0])


def steps(parts: Parts, slots: list[Slot], texts: list[list[int]]) -> list[list[Floats]]:
    """Each text in a slot: two chunks and some decoded tokens, all slots taking turns."""
    found: list[list[Floats]] = [[] for _ in slots]
    for start, stop in ((0, 20), (20, 50)):
        for slot, ids, rows in zip(slots, texts, found, strict=True):
            logits = run(parts, slot, ids[start:stop], "last")
            assert logits is not None
            rows.append(logits[0])
    for i in range(50, 60):
        for slot, ids, rows in zip(slots, texts, found, strict=True):
            rows.append(parts.forwards.decode(slot, ids[i]).copy())
            slot.commit(1)
    return found


@pytest.mark.parametrize("n_slots", [1, 3])
def test_the_layout_is_what_a_slot_takes(model: Path, n_slots: int) -> None:
    options = on_the_cpu(model, max_ctx=500, cache_type_k="f16", cache_type_v="q8_0")
    with assembled(options, n_slots=n_slots) as parts:
        layout = parts.slots.layout
        assert layout.n_ctx == 512
        assert parts.slots.n_bytes == n_slots * layout.slot_bytes
        assert parts.ledger.by_label("CPU")["state"] == parts.slots.n_bytes
        for t in layout.tensors:
            found = parts.slots.tensors[t.name]
            assert (found.type, found.n_bytes) == (t.type, n_slots * t.n_bytes)
            kinds = {"k": ElementType.F16, "v": ElementType.Q8_0}
            assert t.type == kinds.get(t.name.rpartition(".")[2], ElementType.F32)


def test_the_layout_grows_by_rows_and_recurrent_state_not_at_all(model: Path) -> None:
    with assembled(on_the_cpu(model)) as parts:
        architecture, config = parts.model.architecture, parts.model.config
        small, large = (
            architecture.state_layout(config, n, ElementType.F16, ElementType.Q8_0) for n in (256, 1024)
        )
    assert large.recurrent_bytes == small.recurrent_bytes
    kv_row = config.kv_dim * 2 + ElementType.Q8_0.row_bytes(config.kv_dim)
    pooled = [t for t in large.tensors if t.positions_per_row > 1]
    rows = sum((1024 - 256) // t.positions_per_row * t.type.row_bytes(t.shape[0]) for t in pooled)
    assert large.slot_bytes - small.slot_bytes == (1024 - 256) * kv_row * len(config.attention_layers) + rows


@pytest.mark.parametrize("output", ["none", "last", "all"])
@pytest.mark.parametrize("n_tokens", [1, 2, 64])
def test_a_forward_stays_below_the_bound_on_its_operations(
    model: Path, flash_attn: OnOff, n_tokens: int, output: OutputKind
) -> None:
    with assembled(on_the_cpu(model, flash_attn=flash_attn)) as parts:
        config, bound = parts.model.config, parts.model.architecture.max_nodes(parts.model.config)
        inputs = Inputs(
            parts.backend,
            parts.ledger,
            parts.model.architecture,
            config,
            max_rows=n_tokens,
            max_kv=BUCKET,
            embedded=False,
        )
        key = GraphKey(n_tokens=n_tokens, n_kv=BUCKET, slot=0, output=output)
        builder, _ = build_forward(parts.backend, parts.model, parts.slots.tensors, inputs, key)
        n_nodes = builder.n_nodes
        builder.close()
        inputs.close()
    assert 0 < n_nodes < bound
