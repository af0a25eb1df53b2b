"""The maths of the supported models in double precision, from their definitions, a whole text at once.

Nothing is shared with the engine but the reading of the file. Rows are tokens: activations are
[n_tokens, width], matrices [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.ggml.gguf import GgufFile
from tests.reference.blocks import numbers
from tests.reference.rotary import Rotary

Array = NDArray[np.float64]
MIN_WEIGHT_SUM = 2.0**-14


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def rms(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def unit(x: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps))


@dataclass(frozen=True, slots=True)
class Result:
    """Logits [n_tokens, n_vocab]; per token, by how much the last chosen expert beat the next (logits).

    `group_gap`: the same for groups of tokens that sparse attention chooses, in terms of their scores.
    """

    logits: Array
    router_gap: Array
    group_gap: Array | None = None


class Reference:
    """One model file, ready to compute."""

    def __init__(self, path: Path) -> None:
        with GgufFile.open(path) as file:
            self.metadata: dict[str, Any] = dict(file.metadata)
            self.weights: dict[str, Array] = {
                t.name: numbers(t.type, t.shape, file.data(t)).astype(np.float64)
                for t in file.tensors.values()
            }
        self.architecture = str(self.metadata["general.architecture"])
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))
        self.n_head = int(self.key("attention.head_count"))
        self.n_head_kv = int(np.max(self.key("attention.head_count_kv", self.n_head)))
        self.n_embd = self.weights["token_embd.weight"].shape[1]
        self.head_dim = int(self.key("attention.key_length", self.n_embd // self.n_head))
        self.n_layer = int(self.key("block_count")) - int(self.key("nextn_predict_layers", 0))
        self.hybrid = self.architecture.startswith(("qwen35", "qwen4exp"))
        self.rotary = Rotary(self.key, self.head_dim, self.weights.get("rope_freqs.weight"))
        self.halves = self.architecture != "llama"

    def key(self, name: str, default: Any = None) -> Any:
        """A value of the architecture's metadata."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        assert value is not None, name
        return value

    def forward(self, tokens: list[int]) -> Result:
        """All tokens from the start of a sequence."""
        x = self.weights["token_embd.weight"][tokens]
        gap = np.full(len(tokens), np.inf)
        for i in range(self.n_layer):
            block = f"blk.{i}."
            h = rms(x, self.weights[f"{block}attn_norm.weight"], self.eps)
            x = x + (self.delta_net(block, h) if self.is_recurrent(i) else self.attention(block, h))
            norm = "post_attention_norm" if self.hybrid else "ffn_norm"
            h = rms(x, self.weights[f"{block}{norm}.weight"], self.eps)
            if f"{block}ffn_gate_inp.weight" in self.weights:
                h, gaps = self.experts(block, h)
                gap = np.minimum(gap, gaps)
            else:
                h = self.gated(block, h)
            x = x + h
        x = rms(x, self.weights["output_norm.weight"], self.eps)
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return Result(x @ head.T, gap)

    def is_recurrent(self, layer: int) -> bool:
        if not self.hybrid:
            return False
        listed = self.metadata.get(f"{self.architecture}.attention.recurrent_layers")
        if listed is not None:
            return bool(listed[layer])
        return (layer + 1) % int(self.key("full_attention_interval", 4)) != 0

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.weights[f"{name}.weight"].T
        y = y * self.weights.get(f"{name}.scale", np.ones(1))
        return np.asarray(y + self.weights.get(f"{name}.bias", np.zeros(1)))

    def attention(self, block: str, x: Array) -> Array:
        """Of every token over all tokens up to it."""
        return self.attention_without(block, x, np.triu(np.ones((len(x), len(x)), bool), 1))

    def attention_without(self, block: str, x: Array, hidden: NDArray[np.bool_]) -> Array:
        """Of every token over those that are not hidden [token, other token] from it."""
        n, d, h, hkv = len(x), self.head_dim, self.n_head, self.n_head_kv
        q_width = 2 * d if self.hybrid else d
        if f"{block}attn_qkv.weight" in self.weights:
            fused = self.linear(f"{block}attn_qkv", x)
            q, k, v = np.split(fused, [q_width * h, q_width * h + d * hkv], axis=1)
        else:
            q, k, v = (self.linear(f"{block}attn_{which}", x) for which in "qkv")
        q, k, v = q.reshape(n, h, q_width), k.reshape(n, hkv, d), v.reshape(n, hkv, d)
        q, gate = q[..., :d], q[..., d:]
        if f"{block}attn_q_norm.weight" in self.weights:
            q = rms(q, self.weights[f"{block}attn_q_norm.weight"], self.eps)
            k = rms(k, self.weights[f"{block}attn_k_norm.weight"], self.eps)
        q, k = self.rotary.turn(q, halves=self.halves), self.rotary.turn(k, halves=self.halves)
        scale = float(self.key("attention.scale", 0.0)) or d**-0.5
        out = np.empty((n, h, d))
        for i in range(h):
            j = i // (h // hkv)
            scores = np.where(hidden, -np.inf, scale * q[:, i] @ k[:, j].T)
            out[:, i] = softmax(scores) @ v[:, j]
        if self.hybrid:
            out = out * sigmoid(gate)
        return self.linear(f"{block}attn_output", out.reshape(n, h * d))

    def delta_net(self, block: str, x: Array) -> Array:
        """The recurrence token by token; value head n reads key head n mod n_key."""
        n_key, n_value = int(self.key("ssm.group_count")), int(self.key("ssm.time_step_rank"))
        size, n, w = int(self.key("ssm.state_size")), len(x), self.weights
        y = self.convolution(w[f"{block}ssm_conv1d.weight"], self.linear(f"{block}attn_qkv", x))
        q, k, v = np.split(silu(y), [n_key * size, 2 * n_key * size], axis=1)
        shared = np.arange(n_value) % n_key
        q = unit(q.reshape(n, n_key, size), self.eps)[:, shared]
        k = unit(k.reshape(n, n_key, size), self.eps)[:, shared]
        v = v.reshape(n, n_value, size)
        beta = sigmoid(self.linear(f"{block}ssm_beta", x))
        rate = np.logaddexp(0, self.linear(f"{block}ssm_alpha", x) + w[f"{block}ssm_dt.bias"])
        decay = np.exp(rate * w[f"{block}ssm_a"])

        memory = np.zeros((n_value, size, size))  # [head, key, value]
        out = np.empty((n, n_value, size))
        for t in range(n):
            memory *= decay[t][:, None, None]
            error = v[t] - np.einsum("hkv,hk->hv", memory, k[t])
            memory += np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
            out[t] = np.einsum("hkv,hk->hv", memory, q[t]) / np.sqrt(size)
        z = self.linear(f"{block}attn_gate", x).reshape(n, n_value, size)
        out = rms(out, w[f"{block}ssm_norm.weight"], self.eps) * self.output_gate(z)
        return self.linear(f"{block}ssm_out", out.reshape(n, n_value * size))

    def output_gate(self, z: Array) -> Array:
        """What a delta net's output is multiplied by."""
        return silu(z)

    @staticmethod
    def convolution(taps: Array, u: Array) -> Array:
        """Causal, per channel: the last tap meets the token itself, and zeros lie before the first."""
        n_taps = taps.shape[1]
        padded = np.concatenate([np.zeros((n_taps - 1, u.shape[1])), u])
        return np.asarray(sum(padded[j : j + len(u)] * taps[:, j] for j in range(n_taps)))

    def gated(self, block: str, x: Array, suffix: str = "") -> Array:
        up = self.linear(f"{block}ffn_up{suffix}", x)
        if f"{block}ffn_gate{suffix}.weight" in self.weights:
            gate = self.linear(f"{block}ffn_gate{suffix}", x)
        else:
            gate, up = np.split(up, 2, axis=1)
        return self.linear(f"{block}ffn_down{suffix}", silu(gate) * up)

    def experts(self, block: str, x: Array) -> tuple[Array, Array]:
        """The routed part and the shared expert; and by how much the last chosen beat the first left out."""
        w, n_used = self.weights, int(self.key("expert_used_count"))
        scores = self.linear(f"{block}ffn_gate_inp", x)
        order = np.argsort(-scores, axis=1, kind="stable")
        ranked = np.take_along_axis(scores, order, axis=1)
        gap = np.full(len(x), np.inf)
        if n_used < ranked.shape[1]:
            gap = ranked[:, n_used - 1] - ranked[:, n_used]
        chosen = order[:, :n_used]
        weights = np.take_along_axis(softmax(scores), chosen, axis=1)
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), MIN_WEIGHT_SUM)
        weights = weights * (float(self.key("expert_weights_scale", 0.0)) or 1.0)
        out = np.zeros_like(x)
        for t, row in enumerate(x):
            for expert, weight in zip(chosen[t], weights[t], strict=True):
                out[t] += weight * self.expert(block, int(expert), row)
        if f"{block}ffn_gate_inp_shexp.weight" in w:
            open_ = sigmoid(x @ w[f"{block}ffn_gate_inp_shexp.weight"].reshape(-1, 1))
            out += open_ * self.gated(block, x, "_shexp")
        return out, gap

    def expert(self, block: str, expert: int, row: Array) -> Array:
        def times(name: str, x: Array) -> Array:
            scales = self.weights.get(f"{block}ffn_{name}_exps.scale")
            y = self.weights[f"{block}ffn_{name}_exps.weight"][expert] @ x
            return np.asarray(y if scales is None else y * scales[expert])

        if f"{block}ffn_gate_up_exps.weight" in self.weights:
            gate, up = np.split(times("gate_up", row), 2)
        else:
            gate, up = times("gate", row), times("up", row)
        return times("down", silu(gate) * up)
