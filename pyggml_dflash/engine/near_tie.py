"""How close two logits are when rounding may decide between them. Layer 6.

A forward of several rows sums in another order than one of a single row, and where activations or the
cache are stored in few bits, a difference in the last place can become one of a whole step. Greedy
decoding with drafts gives the tokens of plain decoding except at such near ties, so they are reported.

Each matrix product loses a unit at most, relative to what it gives. Roundings are independent, so their
squares add up: over four products a layer and the head. The difference of two logits loses 1.4 times as
much, and one error in a hundred thousand is beyond 4.4 standard deviations. Of 57,600 choices of small
models, with random and trained weights of 4 to 32 bits, verify forwards of 2 to 16 rows on a CPU changed
169: all within 0.84 of this bound, but one at 1.4 where another expert was chosen. On an H200 texts of
the shipped model parted at leads up to 0.11; its bound is 0.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from pyggml_dflash.engine.graphs import Forwards, Logits
from pyggml_dflash.ggml.element import ElementType

SINGLE: Final = 2.0**-18  # sums of some hundred products in single precision
TENSOR_CORE: Final = 2.0**-10  # single precision on GPUs: 7.8e-4 of a product was measured on an H200
HALF: Final = 2.0**-11
BFLOAT: Final = 2.0**-9
EIGHT_BITS: Final = 2.0**-8  # quantised weights are multiplied with activations of 8 bits
FOUR_BITS: Final = 2.0**-4
DEVIATIONS: Final = 4.4 * 2**0.5
SAMPLE: Final = 4096  # logits that tell their standard deviation well enough


def rounding_unit(weights: Iterable[ElementType], cache: Iterable[ElementType], *, is_host: bool) -> float:
    """The relative error of one product with weights of these types, or over a cache of those."""
    units = {
        ElementType.F32: SINGLE if is_host else TENSOR_CORE,
        ElementType.F16: HALF,
        ElementType.BF16: BFLOAT,
    }
    found = [units.get(type, EIGHT_BITS) for type in weights]
    found += [FOUR_BITS if type == ElementType.Q4_0 else units.get(type, EIGHT_BITS) for type in cache]
    return max(found)


class NearTies:
    """Judges greedy choices of one text, by how far the logits of its first one are spread."""

    def __init__(self, forwards: Forwards) -> None:
        model = forwards.model
        unit = rounding_unit(model.weights.types, forwards.cache_types, is_host=forwards.is_host)
        self._factor = DEVIATIONS * unit * math.sqrt(4 * model.config.n_layer + 1)
        self.bound: float | None = None

    def is_near(self, lead: float, logits: Logits) -> bool:
        """True if another order of sums may choose another token than one with this lead over the others."""
        if self.bound is None:
            self.bound = self._factor * float(logits[:: 1 + len(logits) // SAMPLE].std())
        return lead < self.bound
