"""How rows of several sequences decode together: what was measured, or asked for. Layer 6."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pyggml_dflash.ggml.tensor import WeightKind

# 'single': there is one slot. 'batched': rows go together. 'padded': so they do, and a lone row is
# multiplied with weights of some kinds as two equal rows, where kernels round otherwise for one.
# 'sequential': rows run one after another.
DecodeMode = Literal["single", "batched", "padded", "sequential"]

MOST_ROWS: Final = 16  # of one decode forward; more slots take turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How many rows decode together, and what makes a row the same alone and among others."""

    mode: DecodeMode
    rows: int  # most rows of one decode forward
    exact: bool  # a row's logits do not depend on how many others run beside it
    reason: str
    verify_rows: int = 1  # most rows of a verify forward that give what decoding gives; 1: unknown
    doubled: frozenset[WeightKind] = frozenset()  # weights that a lone row is multiplied with as two rows


UNMEASURED: Final = Batching(mode="batched", rows=MOST_ROWS, exact=False, reason="nothing was measured")
