"""Sparse attention of qwen4exp by its definition, in double precision, row after row, without any cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a layer; `rope_dims` of a head turn, `first_position` is that of the first row."""

    n_embd: int = 48
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    index_heads: int = 3
    index_dim: int = 24
    rope_dims: int = 16
    freq_base: float = 1e4
    eps: float = 1e-6
    budget: int = 64
    ratio: int = 8
    first_position: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """Per row: the layer's output before its projection, scores of the complete groups, chosen groups."""

    outputs: Array
    scores: list[Array]
    chosen: list[set[int]]


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _turned(x: Array, positions: NDArray[np.int64], sizes: Sizes) -> Array:
    """x [row, head, d] with its first dimensions rotated by halves."""
    n = sizes.rope_dims
    angles = positions[:, None, None] * sizes.freq_base ** (-np.arange(0, n, 2) / n)
    cos, sin, out = np.cos(angles), np.sin(angles), x.copy()
    first, second = x[..., : n // 2], x[..., n // 2 : n]
    out[..., : n // 2] = first * cos - second * sin
    out[..., n // 2 : n] = first * sin + second * cos
    return out


def sparse_attention(w: Mapping[str, NDArray[np.float32]], x: NDArray[np.float32], sizes: Sizes) -> Result:
    """The layer over a whole sequence x [row, n_embd]; w holds matrices [out, in] by their names."""
    weights, rows = {name: np.float64(value) for name, value in w.items()}, np.float64(x)
    n, d = len(rows), sizes.head_dim
    positions = sizes.first_position + np.arange(n)

    def heads(name: str, width: int) -> Array:
        return (rows @ weights[f"{name}.weight"].T).reshape(n, -1, width)

    def turned(heads: Array, name: str) -> Array:
        return _turned(_norm(heads, weights[f"{name}.weight"], sizes.eps), positions, sizes)

    both = heads("attn_q", 2 * d)
    q, gate = turned(both[..., :d], "attn_q_norm"), both[..., d:].reshape(n, -1)
    k, v = turned(heads("attn_k", d), "attn_k_norm"), heads("attn_v", d)
    index_q = turned(heads("indexer.q_proj", sizes.index_dim), "indexer.q_norm")
    raw = heads("indexer.k_proj", sizes.index_dim)[:, 0]

    result = Result(np.empty((n, d * sizes.n_head)), [], [])
    for row in range(n):
        scores = _scores(index_q[row], raw[: row + 1], weights["indexer.k_norm.weight"], sizes)
        best = np.argsort(-scores, kind="stable")[: sizes.budget // sizes.ratio]  # of equals, the lowest
        tail = range(len(scores) * sizes.ratio, row + 1)
        seen = sorted([*tail, *(g * sizes.ratio + i for g in best for i in range(sizes.ratio))])
        result.scores.append(scores)
        result.chosen.append({int(g) for g in best})
        for head in range(sizes.n_head):
            kv = head // (sizes.n_head // sizes.n_head_kv)
            exponents = k[seen, kv] @ q[row, head] / np.sqrt(d)
            share = np.exp(exponents - exponents.max())
            result.outputs[row, head * d : (head + 1) * d] = share / share.sum() @ v[seen, kv]
    result.outputs[:] /= 1 + np.exp(-gate)
    return result


def _scores(q: Array, raw: Array, weight: Array, sizes: Sizes) -> Array:
    """Of one query, for each group that is complete in `raw`."""
    n_groups, ratio = len(raw) // sizes.ratio, sizes.ratio
    means = raw[: n_groups * ratio].reshape(n_groups, ratio, raw.shape[1]).mean(axis=1)
    positions = sizes.first_position + ratio * np.arange(n_groups)
    keys = _turned(_norm(means, weight, sizes.eps)[:, None], positions, sizes)[:, 0]
    return np.asarray(np.maximum(keys @ q.T, 0).sum(axis=1) / np.sqrt(sizes.index_dim))
