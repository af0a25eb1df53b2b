"""Quantised blocks for tests: random ones of every element type, and what numbers a tensor's bytes stand for.

Any bytes are valid in a block but for its scales, which have to be small finite numbers. So random blocks
reach every code of a type without a quantiser. Their spread is set by measuring what random blocks of scale 1
hold.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.ggml.arena import TensorArena, write
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import GraphAllocator, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
E = ElementType

# Where a block has half-precision factors: byte offsets. All else in it may be any bytes.
HALF_FACTORS: dict[ElementType, tuple[int, ...]] = {
    E.Q4_0: (0,),
    E.Q4_1: (0, 2),
    E.Q5_0: (0,),
    E.Q5_1: (0, 2),
    E.Q8_0: (0,),
    E.Q2_K: (80, 82),
    E.Q3_K: (108,),
    E.Q4_K: (0, 2),
    E.Q5_K: (0, 2),
    E.Q6_K: (208,),
    E.IQ2_XXS: (0,),
    E.IQ2_XS: (0,),
    E.IQ2_S: (0,),
    E.IQ3_XXS: (0,),
    E.IQ3_S: (0,),
    E.IQ1_S: (0,),
    E.IQ4_NL: (0,),
    E.IQ4_XS: (0,),
    E.TQ1_0: (52,),
    E.TQ2_0: (64,),
}
IQ1_M_SCALES = 48  # byte offset of four 16-bit words, whose highest four bits make up the factor
FLOATS = (E.F32, E.F16, E.BF16)
WEIGHT_TYPES = (*FLOATS, *HALF_FACTORS, E.IQ1_M)


def random_tensor(
    element: ElementType, shape: tuple[int, ...], *, spread: float, rng: np.random.Generator
) -> Bytes:
    """Bytes of a tensor of `shape` (ggml order) whose numbers have the standard deviation `spread`.

    Zeros for a type that is not for weights.
    """
    if element not in WEIGHT_TYPES:
        return np.zeros(element.row_bytes(int(np.prod(shape))), np.uint8)
    if element in FLOATS:
        return encoded(element, (spread * rng.standard_normal(shape[::-1])).astype(np.float32))
    assert shape[0] % element.block == 0, f"rows of {shape[0]} are no whole number of {element.label} blocks"
    n_blocks = int(np.prod(shape)) // element.block
    return _blocks(element, n_blocks, spread / _spread_of_unit_blocks(element), rng).reshape(-1)


def encoded(element: ElementType, values: Floats) -> Bytes:
    """Numbers as an unquantised type."""
    if element == E.F32:
        return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    if element == E.F16:
        return values.astype(np.float16).reshape(-1).view(np.uint8)
    assert element == E.BF16
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)  # to the nearest, ties to even
    return (bits >> 16).astype(np.uint16).view(np.uint8)


def _blocks(element: ElementType, n: int, factor: float, rng: np.random.Generator) -> Bytes:
    blocks = rng.integers(0, 256, (n, element.block_bytes), dtype=np.uint8)
    for i, offset in enumerate(HALF_FACTORS.get(element, ())):
        scaled = factor * rng.uniform(0.8, 1.2, n) * (1 if i == 0 else _second_factor(element))
        blocks[:, offset : offset + 2] = scaled.astype(np.float16)[:, None].view(np.uint8)
    if element == E.IQ1_M:
        bits = (factor * rng.uniform(0.8, 1.2, n)).astype(np.float16).view(np.uint16)
        words = blocks[:, IQ1_M_SCALES:].copy().view(np.uint16) & np.uint16(0x0FFF)
        for i in range(4):
            words[:, i] |= ((bits >> np.uint16(4 * i)) & np.uint16(15)) << np.uint16(12)
        blocks[:, IQ1_M_SCALES:] = words.view(np.uint8)
    return blocks


def _second_factor(element: ElementType) -> float:
    """What the offset of a block is in terms of its scale, so that its numbers lie around zero."""
    return {E.Q4_1: -7.5, E.Q5_1: -15.5, E.Q2_K: 1.5, E.Q4_K: 7.5, E.Q5_K: 15.5}[element]


@cache
def _spread_of_unit_blocks(element: ElementType) -> float:
    blocks = _blocks(element, 256, 1.0, np.random.default_rng(0))
    return float(numbers(element, (element.block, 256), blocks.reshape(-1)).std())


def numbers(element: ElementType, shape: tuple[int, ...], data: Bytes) -> Floats:
    """What a tensor of `shape` (ggml order) holds, in NumPy's order; ggml reads quantised rows."""
    if element == E.F32:
        return data.view(np.float32).reshape(shape[::-1])
    if element == E.F16:
        return data.view(np.float16).reshape(shape[::-1]).astype(np.float32)
    if element == E.BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape[::-1])
    return _rows(element, shape[0], data).reshape(shape[::-1])


def _rows(element: ElementType, width: int, data: Bytes) -> Floats:
    n_rows = len(data) // element.row_bytes(width)
    with ExitStack() as stack:
        ledger = Ledger()
        backend = Backend(choose_device("CPU"), threads=1)
        stack.callback(backend.close)
        arena = TensorArena(backend, ledger, "rows", n_tensors=2)
        stack.callback(arena.close)
        table, ids = arena.declare("table", element, width, n_rows), arena.declare("ids", E.I32, n_rows)
        arena.allocate()
        write(table, np.ascontiguousarray(data))
        write(ids, np.arange(n_rows, dtype=np.int32))
        builder = GraphBuilder(64)
        stack.callback(builder.close)
        out = builder.output(builder.get_rows(table, ids))
        allocator = GraphAllocator(backend, ledger, "rows")
        stack.callback(allocator.close)
        found = StepGraph(backend, builder, (out,), allocator).run()[0]
        return np.array(found, np.float32)
