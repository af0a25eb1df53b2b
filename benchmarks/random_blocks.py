"""Random weights in ggml's block formats, in any amount, without ever holding them all.

A pool of random blocks per type and spread is made once; a tensor is cut out of it, starting at a random
block and going round. The pool has a prime number of blocks, more than any model here has rows, so two rows
of a tensor never start at the same block: rows differ, and an argmax over them has no ties.

Every block has valid scales, and values of mean 0 and the standard deviation asked for:

    Q4_K, Q5_K   d * s * (q - middle), written as d * s * q - dmin * s with dmin = middle * d
    Q6_K         d * s * (q - 32)
    Q4_0, Q5_0   d * (q - 8) and d * (q - 16)
    Q5_1         d * q + m with m = -middle * d
    Q8_0         d * q
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.ggml.element import ElementType

Bytes = npt.NDArray[np.uint8]

POOL_BLOCKS: Final = 250_007  # a prime above the 248,320 rows of the largest head
LOW_SCALE, HIGH_SCALE = 32, 64  # of 6 bits, so that a scale uses its upper half
SPREAD_OF_D: Final = (0.8, 1.2)  # blocks differ in their scale


class BlockPool:
    """Random weights of any type; the same seed gives the same bytes."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.SFC64(seed))
        self._pools: dict[tuple[ElementType, float], Bytes] = {}

    def tensor(self, element: ElementType, n_elements: int, std: float) -> Iterator[Bytes]:
        """The bytes of `n_elements` values of standard deviation `std`, in pieces."""
        pool = self._pools.get((element, std))
        if pool is None:
            pool = self._pools[element, std] = _MAKERS[element](self._rng, POOL_BLOCKS, std)
        return _cut(pool, int(self._rng.integers(POOL_BLOCKS)), n_elements // element.block)


def _cut(pool: Bytes, start: int, n_blocks: int) -> Iterator[Bytes]:
    while n_blocks:
        n = min(n_blocks, len(pool) - start)
        yield pool[start : start + n]
        start, n_blocks = 0, n_blocks - n


def _random_bytes(rng: np.random.Generator, n_rows: int, n_columns: int) -> Bytes:
    return np.frombuffer(rng.bytes(n_rows * n_columns), np.uint8).reshape(n_rows, n_columns)


def _half(values: npt.NDArray[np.float32]) -> Bytes:
    """F16 numbers as two bytes each: [n, 2]."""
    return values.astype("<f2").view(np.uint8).reshape(len(values), 2)


def _d(rng: np.random.Generator, n: int, mean: float) -> npt.NDArray[np.float32]:
    """Block scales around `mean`, already rounded to F16."""
    return (mean * rng.uniform(*SPREAD_OF_D, n)).astype("<f2").astype(np.float32)


def _pack_scales(scales: Bytes) -> Bytes:
    """Eight 6-bit scales, each used as its own minimum's scale too: [n, 8] to [n, 12]."""
    first, last = scales[:, :4], scales[:, 4:]
    high = (last >> 4) << 6
    return np.concatenate([first | high, first | high, (last & 15) | ((last & 15) << 4)], axis=1)


def _k_with_minimum(
    rng: np.random.Generator, n: int, std: float, *, n_values: int, n_quant_bytes: int
) -> Bytes:
    """Q4_K and Q5_K: d, dmin, packed scales, then quants of which every bit is free."""
    middle, spread = (n_values - 1) / 2, np.sqrt((n_values**2 - 1) / 12)
    scales = rng.integers(LOW_SCALE, HIGH_SCALE, (n, 8), np.uint8)
    typical = np.sqrt(np.mean(np.arange(LOW_SCALE, HIGH_SCALE) ** 2.0))
    d = _d(rng, n, std / (typical * spread))
    parts = [_half(d), _half(middle * d), _pack_scales(scales), _random_bytes(rng, n, n_quant_bytes)]
    return np.concatenate(parts, axis=1)


def _q6_k(rng: np.random.Generator, n: int, std: float) -> Bytes:
    magnitudes = rng.integers(64, 128, (n, 16)).astype(np.int8)
    scales = magnitudes * rng.choice(np.array([-1, 1], np.int8), (n, 16))
    spread = np.sqrt(np.mean(np.arange(64, 128) ** 2.0)) * np.sqrt((64**2 - 1) / 12)
    return np.concatenate(
        [_random_bytes(rng, n, 192), scales.view(np.uint8), _half(_d(rng, n, std / spread))], axis=1
    )


def _plain(rng: np.random.Generator, n: int, std: float, *, n_bits: int) -> Bytes:
    """Q4_0, Q5_0 and Q8_0: a scale of either sign, since codes lean to one, and 32 numbers of any bits."""
    spread = np.sqrt((4.0**n_bits - 1) / 12)
    d = _d(rng, n, std / spread) * rng.choice(np.array([-1, 1], np.float32), n)
    return np.concatenate([_half(d), _random_bytes(rng, n, 4 * n_bits)], axis=1)


def _q5_1(rng: np.random.Generator, n: int, std: float) -> Bytes:
    d = _d(rng, n, std / np.sqrt((32**2 - 1) / 12))
    return np.concatenate([_half(d), _half(-15.5 * d), _random_bytes(rng, n, 20)], axis=1)


def _floats(rng: np.random.Generator, n: int, std: float, *, element: ElementType) -> Bytes:
    values = rng.normal(0, std, n).astype("<f4")
    if element is ElementType.F16:
        values = values.astype("<f2")
    raw = values.view(np.uint8).reshape(n, -1)
    return np.ascontiguousarray(raw[:, 2:]) if element is ElementType.BF16 else raw


_MAKERS: Final[dict[ElementType, Callable[[np.random.Generator, int, float], Bytes]]] = {
    ElementType.F32: partial(_floats, element=ElementType.F32),
    ElementType.F16: partial(_floats, element=ElementType.F16),
    ElementType.BF16: partial(_floats, element=ElementType.BF16),
    ElementType.Q4_0: partial(_plain, n_bits=4),
    ElementType.Q5_0: partial(_plain, n_bits=5),
    ElementType.Q5_1: _q5_1,
    ElementType.Q8_0: partial(_plain, n_bits=8),
    ElementType.Q4_K: partial(_k_with_minimum, n_values=16, n_quant_bytes=128),
    ElementType.Q5_K: partial(_k_with_minimum, n_values=32, n_quant_bytes=160),
    ElementType.Q6_K: _q6_k,
}
