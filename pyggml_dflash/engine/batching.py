"""How rows of several sequences decode together: what was measured, or asked for. Layer 6."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from pyggml_dflash.ggml.padding import NO_PADDING, Padding, Paddings

# 'single': there is one slot. 'batched': rows go together. 'padded': so they do, and products with weights
# of some kinds are made of more rows than there are, where kernels round otherwise for few. 'sequential':
# rows run one after another.
DecodeMode = Literal["single", "batched", "padded", "sequential"]

# What products may be made of, the cheapest first.
PADDINGS: Final = (Padding(), Padding(least=2), Padding(least=4, multiple=4))
MOST_ROWS: Final = 16  # of one decode forward; more slots take turns
MOST_JOINED: Final = 128  # rows of a forward that several prompts share
# The same on a CPU, where more give little (docs/measurements/cpu-batches.md), and on a worker, often one.
MOST_JOINED_CPU: Final = 64
# Multiplications of a CPU's thread that take about a second. They are counted, since by the clock a model
# would round otherwise on one day than on the next.
THREAD_WORK: Final = 25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How many rows decode together, and what makes a row the same alone and among others."""

    mode: DecodeMode
    rows: int  # most rows of one decode forward
    exact: bool  # a row's logits do not depend on how many others run beside it
    reason: str
    verify_rows: int = 1  # most rows of a verify forward that give what decoding gives; 1: unknown
    ragged_rows: int = 1  # the same for one over several slots, of all of them together; 1: unknown
    joined_rows: range = range(0)  # of prompts, and of all together, that may share a forward
    joined_reason: str = "there is one slot"
    paddings: Paddings = NO_PADDING  # of products with weights


def most_ragged_rows(n_slots: int, max_width: int) -> int:
    """The most rows that verify forwards over several slots are looked at with; 0: there are none."""
    return min(MOST_ROWS, n_slots * max_width) if n_slots > 1 and max_width > 1 else 0


UNMEASURED: Final = Batching(mode="batched", rows=MOST_ROWS, exact=False, reason="nothing was measured")
# What takes most memory of all that a probe may choose, but for `joined_rows`.
LARGEST: Final = replace(UNMEASURED, paddings=Paddings(others=PADDINGS[-1]))
