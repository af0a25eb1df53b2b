"""Attention of few rows of a prompt in whole tiles of the CPU's fused kernel. Layer 4.

From `TILE_ROWS` query rows on that kernel works on tiles, below it goes row by row, and a row then costs many
times as much. Heads that share a key head ask the same keys, so their rows fill tiles together; what is still
empty is filled with zeros, whose results are dropped.
"""

from __future__ import annotations

from typing import Final

from pyggml_dflash.arch.base import Step
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor

TILE_ROWS: Final = 64
MOST_ROWS: Final = 2 * TILE_ROWS  # of joined heads: bounds the mask, which has as many
# A tile takes as long as 4 to 6 rows one by one (docs/measurements/cpu-flash-attention.md).
LEAST_ROWS: Final = 6


def joined_heads(n: int, n_sharing: int) -> int:
    """Of how many of the heads that share keys `n` rows each go together: the fewest that make least tiles.

    0: rows go one by one, which takes no longer.
    """
    ways = [k for k in range(1, n_sharing + 1) if n_sharing % k == 0 and (k == 1 or k * n <= MOST_ROWS)]
    best = min(ways, key=lambda k: (n_sharing // k * -(-k * n // TILE_ROWS), k))
    return best if 1 < n < TILE_ROWS and best * n >= LEAST_ROWS else 0


def mask_rows(n: int, n_sharing: int) -> int:
    """Rows of the mask that `n` rows attend with: at least those of the tiles, a multiple of `n`."""
    made = joined_heads(n, n_sharing)
    return -(-max(TILE_ROWS, made * n) // n) * n if made else n


def repeated_mask(g: GraphBuilder, step: Step, mask: Tensor, n_sharing: int) -> Tensor:
    """The mask [n_kv, M] over and over, for the rows of joined heads and those that are filled in.

    Layers of one backend share that of the step's own mask.
    """
    assert step.tile_masks is not None
    key = n_sharing, g.place
    if mask is step.mask and key in step.tile_masks:
        return step.tile_masks[key]
    n_kv, n = mask.shape[:2]
    repeated = g.repeat(mask, n_kv, mask_rows(n, n_sharing), 1, 1)
    if mask is step.mask:
        step.tile_masks[key] = repeated
    return repeated


def attend_in_tiles(
    g: GraphBuilder, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Attention of q [head_dim, M, head] with a `repeated_mask`: [head_dim * head, M]."""
    d, n, n_head, _ = q.shape
    joined = joined_heads(n, n_head // keys.shape[2])
    rows = g.reshape(g.cont(q), d, joined * n, n_head // joined)
    rows = g.pad_rows_behind(rows, max(0, TILE_ROWS - joined * n))
    out = g.flash_attn(rows, keys, values, mask, scale)  # [head_dim, head / joined, row]
    _, head, row, _ = out.strides
    out = g.view(out, (d, n_head // joined, n, joined), (head, row, n * row), 0)
    return g.cont_2d(g.permute(out, 0, 2, 3, 1), d * n_head, n)
