"""What a DFlash draft computes, straight from its definition, in double precision.

No cache, no ring, no mask tensor: every layer attends over a plain list of all positions, and each pair of
a query and a key is judged on its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.arch.dflash_config import DraftConfig
from pyggml_dflash.ggml.gguf import GgufFile

Array = NDArray[np.float64]


def visible(query: int, key: int, n_past: int, *, window: int, causal: bool) -> bool:
    """Whether the block row at position `query` sees position `key`; the block starts at `n_past`."""
    if key >= n_past and causal and key > query:
        return False
    return window == 0 or abs(query - key) < window


class DraftDefinition:
    """A draft's weights beside its target's embedding table and head."""

    def __init__(self, draft: Path, target: Path, config: DraftConfig) -> None:
        self.config = config
        self._w = _tensors(draft, "")
        shared = _tensors(target, "token_embd.weight", "output.weight")
        self._table = shared["token_embd.weight"]
        self._head = shared.get("output.weight", self._table)

    def block(self, features: Array, anchor: int) -> tuple[Array, Array]:
        """States [block, n_embd] and logits [block, n_vocab] behind committed rows [n, layers * n_embd]."""
        c, w = self.config, self._w
        n_past, block = len(features), self.config.block_size
        hidden = self._norm(features @ w["fc.weight"].T, "enc.output_norm.weight")
        x = self._table[[anchor] + [c.mask_token] * (block - 1)] * c.embedding_scale
        for i in range(c.n_layer):
            p = f"blk.{i}."
            h = self._norm(x, f"{p}attn_norm.weight")
            h, conv = self._convolve_in(f"{p}attn", h)
            h = self._attention(p, i, hidden, h, n_past) * c.value_scale
            x = x + self._convolve(f"{p}attn", h, conv, 1)
            h = self._norm(x, f"{p}ffn_norm.weight")
            h, conv = self._convolve_in(f"{p}ffn", h)
            gate = h @ w[f"{p}ffn_gate.weight"].T
            h = (gate / (1 + np.exp(-gate)) * (h @ w[f"{p}ffn_up.weight"].T)) @ w[f"{p}ffn_down.weight"].T
            x = x + self._convolve(f"{p}ffn", h, conv, 1)
        x = self._norm(x, "output_norm.weight")
        logits = x @ self._head.T * c.logit_scale
        return x, c.softcap * np.tanh(logits / c.softcap) if c.softcap else logits

    def _attention(self, p: str, layer: int, context: Array, x: Array, n_past: int) -> Array:
        c, w, n_rows = self.config, self._w, len(x)
        both = np.concatenate([context, x])
        k = self._heads(both @ w[f"{p}attn_k.weight"].T, f"{p}attn_k_norm.weight", 0)
        q = self._heads(x @ w[f"{p}attn_q.weight"].T, f"{p}attn_q_norm.weight", n_past)
        v = (both @ w[f"{p}attn_v.weight"].T).reshape(len(both), -1, c.head_dim)
        how: dict[str, Any] = {"window": c.windows[layer], "causal": c.causal[layer]}
        seen = np.array(
            [[visible(n_past + i, j, n_past, **how) for j in range(len(both))] for i in range(n_rows)]
        )
        out = np.empty((n_rows, c.n_head, c.head_dim))
        for head in range(c.n_head):
            kv = head * c.n_head_kv // c.n_head
            scores = np.where(seen, q[:, head] @ k[:, kv].T * c.attn_scale, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv]
        result: Array = out.reshape(n_rows, -1) @ w[f"{p}attn_output.weight"].T
        return result

    def _heads(self, x: Array, norm: str, first: int) -> Array:
        """Heads [n, head, head_dim], normalised, and turned by the angles of positions from `first` on."""
        x = self._norm(x.reshape(len(x), -1, self.config.head_dim), norm)
        half, base = self.config.head_dim // 2, self.config.rope.freq_base
        angles = (first + np.arange(len(x)))[:, None, None] * base ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
        return np.concatenate(turned, axis=-1)

    def _norm(self, x: Array, name: str) -> Array:
        size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config.norm_eps)
        result: Array = x / size * self._w[name]
        return result

    def _convolve_in(self, part: str, x: Array) -> tuple[Array, Array | None]:
        if self.config.conv is None:
            return x, None
        conv = (x @ self._w[f"{part}_conv_proj.weight"].T).reshape(len(x), 2, self.config.conv.n_taps, -1)
        return self._convolve(part, x, conv, 0), conv

    def _convolve(self, part: str, x: Array, conv: Array | None, side: int) -> Array:
        if conv is None or self.config.conv is None:
            return x
        base, out = self._w[f"{part}_conv_base"], np.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(self.config.conv.n_taps, row + 1)):
                dynamic = np.repeat(conv[row, side, tap], self.config.conv.group_size)
                out[row] += (base[side, tap] + dynamic) * x[row - tap]
        return out


def _tensors(path: Path, *names: str) -> dict[str, Array]:
    """Tensors of a file in which all are F32; only those whose names start as given."""
    with GgufFile.open(path) as file:
        return {
            t.name: file.data(t).view(np.float32).reshape(t.shape[::-1]).astype(np.float64)
            for t in file.tensors.values()
            if t.name.startswith(names)
        }
