"""What the probe of bit equality says holds, for every type of weights; what follows from its findings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.engine.batching import PADDINGS
from pyggml_dflash.engine.invariance import Agreement, choose, measure_batching
from pyggml_dflash.ggml.arena import read
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.padding import Padding, Paddings
from pyggml_dflash.ggml.products import Product
from pyggml_dflash.ggml.tensor import Tensor, WeightKind
from tests.reference.opened import OnOff, Parts, assembled, on_the_cpu
from tests.reference.stored import model_file
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
            assert not found.paddings


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


def test_products_of_few_results_are_told_apart_like_large_ones(tmp_path: Path) -> None:
    """Of this model a single row of ssm_alpha gives the same four results in either order of sums."""
    with assembled(on_the_cpu(model_file("qwen4exp-tiny", "F16", tmp_path), max_ctx=256), n_slots=3) as parts:
        found = measure_batching(parts.forwards, parts.slots.slots, parts.backend, parts.ledger)
        alike = [
            found.paddings.kinds.get(product.kind)
            for product in parts.forwards.products()
            if product.kind.type == ElementType.F16 and product.kind.shape[1] % 4 == 0 and not product.n_used
        ]
        assert len(alike) >= 10
        assert alike == alike[:1] * len(alike)


def kind(element: ElementType, n_out: int = 64) -> WeightKind:
    return WeightKind(element, (64, n_out, 1), "CPU")


def agreement(element: ElementType, *rows: int) -> Agreement:
    """A product whose rows agree so far without padding, as two and more, in fours."""
    product = Product(Tensor(None), kind(element))
    return Agreement(product=product, rows=dict(zip(PADDINGS, rows, strict=False)))


NONE, TWO, FOUR = PADDINGS
ANY = agreement(ElementType.Q8_0, 16)
HALF = agreement(ElementType.F16, 1, 16)
PACKED = agreement(ElementType.Q4_K, 3, 3, 16)
STRICT = agreement(ElementType.Q6_K, 2, 2, 2)
NEVER = agreement(ElementType.Q5_K, 1, 1, 1)


@pytest.mark.parametrize(
    ("found", "slots", "width", "mode", "rows", "verify_rows", "paddings"),
    [
        ((ANY,), 4, 1, "batched", 4, 1, {}),
        ((ANY,), 2, 8, "batched", 2, 8, {}),
        ((ANY, HALF), 4, 16, "padded", 4, 16, {ElementType.F16: TWO}),
        ((ANY, PACKED), 3, 1, "batched", 3, 1, {}),
        ((PACKED,), 4, 1, "padded", 4, 1, {ElementType.Q4_K: FOUR}),
        ((PACKED,), 2, 8, "padded", 2, 8, {ElementType.Q4_K: FOUR}),
        ((HALF, PACKED, STRICT), 4, 8, "padded", 2, 2, {ElementType.F16: TWO}),
        ((HALF, NEVER), 4, 8, "sequential", 1, 1, {}),
    ],
)
def test_products_are_padded_as_little_as_all_rows_need(
    found: tuple[Agreement, ...],
    slots: int,
    width: int,
    mode: str,
    rows: int,
    verify_rows: int,
    paddings: dict[ElementType, Padding],
) -> None:
    """A product that allows few rows anyway spares the others."""
    batching = choose(found, slots, width)
    assert (batching.mode, batching.rows, batching.verify_rows) == (mode, rows, verify_rows)
    assert {kind.type: padding for kind, padding in batching.paddings.kinds.items()} == paddings
    for element in paddings:
        assert element.label in batching.reason
    if rows < slots:
        assert min(found, key=lambda a: a.most).product.kind.type.label in batching.reason


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_product_is_made_of_enough_rows_and_those_of_long_prompts_are_left_alone(padding: Padding) -> None:
    for n in range(1, 129):
        made = padding.rows(n)
        assert made >= max(n, padding.least)
        assert made % padding.multiple == 0
        assert made - n < max(padding.least, padding.multiple)
    assert [padding.rows(n) for n in (129, 509)] == [129, 509]


@pytest.mark.parametrize("padding", PADDINGS[1:])
@pytest.mark.parametrize("n", range(1, 18))
def test_rows_of_a_padded_product_are_those_of_the_product(padding: Padding, n: int, tmp_path: Path) -> None:
    """Q8_0 rounds alike for any number of rows on CPUs, so a wrong row shows."""
    path = wide("llama", "Q8_0", tmp_path)
    with assembled(on_the_cpu(path, max_ctx=256, repack="off"), n_slots=17) as parts:
        forwards, slots = parts.forwards, parts.slots.slots[:n]
        found = []
        for paddings in (Paddings(), Paddings(others=padding)):
            forwards.use(replace(forwards.batching, rows=17, paddings=paddings))
            found.append(forwards.decode_batch(slots, tokens(n, seed=n)).copy())
            for slot in slots:
                slot.reset()
        np.testing.assert_array_equal(found[1], found[0])
