"""Weights of every element type compute what the numbers in their blocks say.

Blocks are random, so every code of a type occurs. Kernels round activations to what a type multiplies with:
not at all for F32, to half precision for F16 and BF16, to 8 bits for quantised weights.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from pyggml_dflash.ggml.element import ElementType
from tests.reference.blocks import HALF_FACTORS, WEIGHT_TYPES
from tests.reference.forward import Array
from tests.reference.opened import Floats, OnOff, on_the_cpu, open_core
from tests.reference.qwen4exp import reference
from tests.tiny import Tiny, is_quantisable, tensor_shapes, tokens, write_tiny

# Root mean square of what the rounding of activations adds, as a share of the logits' own; about twice what
# was measured.
ROUNDING = {ElementType.F32: 1e-5, ElementType.F16: 2e-3, ElementType.BF16: 1e-2}
EIGHT_BITS = 6e-2

# One row and many run different kernels, and so do weights in a layout of the device's own.
KERNELS: tuple[tuple[int, OnOff], ...] = ((1, "on"), (24, "on"), (1, "off"), (24, "off"))


def distance(found: Floats, expected: Array) -> float:
    """Root mean square of the difference, as a share of the expected spread."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def tiny(architecture: str, element: ElementType) -> Tiny:
    """All matrices, the table and the experts in one type; every expert is used, so that none is chosen."""
    return Tiny(
        architecture=architecture,
        n_embd=256,
        n_layer=2,
        head_dim=64,
        n_ff=256,
        net_head_dim=64,
        n_key_head=2,
        n_value_head=4,
        n_expert=2,
        n_used=2,
        expert_ff=256,
        shared_ff=256,
        low_rank=256,
        index_dim=64,
        ngram_dim=64,
        elements={"": element},
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
@pytest.mark.parametrize("element", WEIGHT_TYPES, ids=lambda element: element.label)
def test_logits_are_those_of_the_numbers_in_the_blocks(
    tmp_path: Path, element: ElementType, architecture: str
) -> None:
    path, ids = write_tiny(tmp_path, tiny(architecture, element)), tokens(24, seed=8)
    expected = reference(path).forward(ids).logits
    for chunk, repack in KERNELS:
        with open_core(on_the_cpu(path, chunk=chunk, flash_attn="off", repack=repack)) as core:
            found = core.logits(ids)
        assert distance(found, expected) <= ROUNDING.get(element, EIGHT_BITS), (chunk, repack)


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe", "qwen4exp"])
def test_each_tensor_may_have_a_type_of_its_own(tmp_path: Path, architecture: str) -> None:
    model = tiny(architecture, ElementType.F32)
    matrices = [name for name, shape in tensor_shapes(model).items() if is_quantisable(name, shape)]
    mixed = dict(zip(matrices, cycle(HALF_FACTORS), strict=False))
    path, ids = write_tiny(tmp_path, replace(model, elements=mixed)), tokens(24, seed=9)
    expected = reference(path).forward(ids).logits
    with open_core(on_the_cpu(path)) as core:
        assert distance(core.logits(ids), expected) <= EIGHT_BITS
