"""The n-gram embedding of qwen4exp from its definition, a whole sequence at once, token by token.

The hash is written with Python's integers, the rest in double precision. Rows are tokens; streams lie side by
side, [n_tokens, stream, n_embd].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.forward import rms, sigmoid, silu

Array = NDArray[np.float64]
WRAP = 2**64


def hashed(
    tokens: Sequence[int],
    *,
    n_gram: int,
    eos: int,
    multipliers: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int],
) -> list[list[int]]:
    """The rows that every token of a sequence reads, head by head."""
    per_length = len(sizes) // (n_gram - 1)
    found = []
    for i in range(len(tokens)):
        window, cut = [tokens[i]], False
        for lag in range(1, n_gram):
            cut = cut or i < lag or tokens[i - lag] == eos
            window.append(eos if cut else tokens[i - lag])
        rows = []
        for head, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            mixed = 0
            for j in range(2 + head // per_length):
                mixed ^= window[j] * multipliers[j] % WRAP
            rows.append(mixed % size + offset)
        found.append(rows)
    return found


def ple(weights: Mapping[str, Array], rows: Array, residual: Array, n_gram: int, eps: float) -> Array:
    """What the module adds to a whole sequence's residual; `weights` are named as after 'blk.N.'."""
    n_tokens, n_stream, n_embd = residual.shape

    def normed(x: Array, name: str) -> Array:
        return rms(x, weights[f"ple_norm_{name}.weight"].reshape(n_stream, n_embd), eps)

    key = normed((rows @ weights["ple_key.weight"].T).reshape(residual.shape), "key")
    score = (key * normed(residual, "query")).sum(-1, keepdims=True) / np.sqrt(n_embd)
    gate = sigmoid(np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6)))
    gated = (rows @ weights["ple_value.weight"].T)[:, None, :] * gate
    columns, taps = normed(gated, "conv"), weights["ple_conv1d.weight"].reshape(n_stream, n_embd, -1)
    past = np.zeros_like(columns)
    n_taps = taps.shape[-1]
    for i in range(n_tokens):
        for tap in range(n_taps):
            earlier = i - n_gram * (n_taps - 1 - tap)
            if earlier >= 0:
                past[i] += taps[..., tap] * columns[earlier]
    return np.asarray(gated + silu(past))
