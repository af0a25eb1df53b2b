"""What the probe of bit equality says holds, for every type of weights; what follows from its findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyggml_dflash.engine.invariance import Agreement, choose, measure_batching
from pyggml_dflash.ggml.arena import read
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.products import Product
from pyggml_dflash.ggml.tensor import Tensor, WeightKind
from tests.reference.opened import OnOff, Parts, assembled, on_the_cpu
from tests.tiny import Tiny, tokens, write_tiny

# Rows of a block of any type are whole; so are those of repacked layouts.
WIDE = {
    "n_embd": 256,
    "n_layer": 2,
    "n_ff": 256,
    "expert_ff": 256,
    "shared_ff": 256,
    "net_head_dim": 64,
    "head_dim": 64,
}
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS")


def wide(architecture: str, element: str, folder: Path) -> Path:
    elements = {"": ElementType[element]}
    return write_tiny(folder, Tiny(architecture=architecture, elements=elements, **WIDE))  # type: ignore[arg-type]


def logits_of(parts: Parts, n: int) -> list[list[bytes]]:
    """By token and slot, where `n` slots have the same text; the rest of a batch stands before them."""
    slots = parts.slots.slots[-n:]
    for slot in slots:
        slot.reset()
    found = []
    for token in tokens(3, seed=5):
        rows = parts.forwards.decode_batch(slots, [token] * n)
        found.append([row.tobytes() for row in rows])
        for slot in slots:
            slot.commit(1)
    return found


@pytest.mark.parametrize("repack", ["on", "off"])
@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_rows_are_equal_alone_and_over_as_many_rows_as_was_found(
    tmp_path: Path, architecture: str, element: str, repack: OnOff
) -> None:
    options = on_the_cpu(wide(architecture, element, tmp_path), max_ctx=256, repack=repack)
    with assembled(options, n_slots=9) as parts:
        found = measure_batching(parts.forwards, parts.slots.slots, parts.backend, parts.ledger)
        assert found.exact
        assert found.rows >= 2, found.reason
        parts.forwards.use(found)
        alone = logits_of(parts, 1)
        for n in (2, 3, 8, 9):
            assert logits_of(parts, n) == [row * n for row in alone], (n, found.reason)


def test_the_probe_leaves_no_trace(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="qwen4exp"))
    with assembled(on_the_cpu(path, max_ctx=256), n_slots=4) as parts:
        held = parts.ledger.by_label("CPU")
        parts.slots.slots[2].commit(0)
        state = {name: read(tensor).tobytes() for name, tensor in parts.state.items()}
        measure_batching(parts.forwards, parts.slots.slots, parts.backend, parts.ledger)
        assert {name: read(tensor).tobytes() for name, tensor in parts.state.items()} == state
        assert [(slot.n_past, slot.recent) for slot in parts.slots.slots] == [(0, ())] * 4
        now = parts.ledger.by_label("CPU")
        assert {label: n for label, n in now.items() if label != "graphs"} == held  # these stay for later


def test_one_slot_needs_no_probe_and_variance_may_be_allowed(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, Tiny(architecture="llama"))
    for n_slots, allow, expected in ((1, False, ("single", 1, True)), (3, True, ("batched", 3, False))):
        with assembled(on_the_cpu(path, max_ctx=256), n_slots=n_slots) as parts:
            slots = parts.slots.slots
            found = measure_batching(parts.forwards, slots, parts.backend, parts.ledger, allow_variance=allow)
            assert (found.mode, found.rows, found.exact) == expected
            assert not found.doubled


def test_every_product_that_decoding_has_is_looked_at(tmp_path: Path) -> None:
    """Forms of attention have products of their own: the indexer's queries are not among those of a start."""
    tiny = Tiny(architecture="qwen4exp", index_heads=5, elements={"indexer.q_proj.weight": ElementType.F16})
    with assembled(on_the_cpu(write_tiny(tmp_path, tiny)), n_slots=2) as parts:
        found = {product.kind for product in parts.forwards.products()}
        names = [name for name in parts.model.weights.file.tensors if name.startswith("blk.1.")]
        for name in names:
            weight = parts.model.weights.get(name)
            assert (
                weight is None or weight.shape[1] == 1 or "conv1d" in name or weight.weight_kind in found
            ), name
        assert parts.model.weights["output.weight"].weight_kind in found


def kind(element: ElementType, n_out: int = 64) -> WeightKind:
    return WeightKind(element, (64, n_out, 1), "CPU")


def agreement(rows: int, *, doubled: bool = False, element: ElementType = ElementType.Q8_0) -> Agreement:
    product = Product(Tensor(None), kind(element))
    return Agreement(product=product, rows=rows, doubled=doubled, lone_s=0.0)


F16 = ElementType.F16


@pytest.mark.parametrize(
    ("found", "mode", "rows", "doubled"),
    [
        ([agreement(4), agreement(4)], "batched", 4, ()),
        ([agreement(4), agreement(3)], "batched", 3, ()),
        ([agreement(4), agreement(4, doubled=True, element=F16)], "padded", 4, (F16,)),
        ([agreement(2), agreement(4, doubled=True, element=F16)], "padded", 2, (F16,)),
        ([agreement(1), agreement(4, doubled=True, element=F16)], "sequential", 1, ()),
    ],
)
def test_the_tightest_product_decides(
    found: list[Agreement], mode: str, rows: int, doubled: tuple[ElementType, ...]
) -> None:
    batching = choose(found, 4)
    assert (batching.mode, batching.rows, batching.exact) == (mode, rows, True)
    assert {kind.type for kind in batching.doubled} == set(doubled)
    if rows < 4:
        assert "q8_0" in batching.reason
    if doubled:
        assert "f16" in batching.reason
