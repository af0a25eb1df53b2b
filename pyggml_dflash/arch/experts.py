"""Routed experts: which ones a token gets, where they compute, and the sum of what they give. Layer 4.

With one device everything is made there. Experts on another device compute there, or are copied for many
rows; copies of those that are picked most compute here. Shapes are ggml's, fastest dimension first; M is the
number of rows (tokens) of the forward.
"""

from __future__ import annotations

from typing import Final

from pyggml_dflash.arch.blocks import feed_forward
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import MoeConfig
from pyggml_dflash.model.weights import BlockWeights

# Smallest sum of chosen expert weights, as the reference models clamp it: the smallest normal F16.
MIN_EXPERT_SUM: Final = 6.103515625e-5
HOT_ROWS: Final = 8  # most rows for which copies of experts are used; prompts go where all experts are


def experts(g: GraphBuilder, w: BlockWeights, x: Tensor, moe: MoeConfig) -> Tensor:
    """Routed experts, weights renormalised over the chosen ones, plus the gated shared expert.

    x [n_embd, M] -> [n_embd, M]; router arithmetic is F32.
    """
    n_tokens = x.shape[1]
    probabilities = g.soft_max(w.linear(g, "ffn_gate_inp", x))  # [n_expert, M]
    chosen = g.top_k(probabilities, moe.n_used)  # [n_used, M]
    g.picks.append(chosen)
    weights = g.get_rows(g.reshape(probabilities, 1, moe.n_expert, n_tokens), chosen)  # [1, n_used, M]
    weights = g.reshape(weights, moe.n_used, n_tokens)
    weights = g.div(weights, g.clamp(g.sum_rows(weights), MIN_EXPERT_SUM, float("inf")))
    weights = g.reshape(weights, 1, moe.n_used, n_tokens)
    if moe.weight_scale not in (0.0, 1.0):
        weights = g.scale(weights, moe.weight_scale)
    g.expand(weights)  # in this order GPUs route in one kernel, and another device is asked once

    far = w["ffn_down_exps.weight"]
    if n_tokens <= HOT_ROWS and w.get("hot.index") is not None:
        total = _hot_and_cold(g, w, x, chosen, weights, moe)
    elif g.streams(far, n_tokens):
        total = _sum_of_used(g, _results(g, w, "exps", x, chosen, moe), weights)
    elif g.near_links and n_tokens <= HOT_ROWS:  # the other device does what only it can do
        with g.at(far):
            out = _results(g, w, "exps", x, chosen, moe)
        total = _sum_of_used(g, out, weights)
    else:
        there = g.sent(x, far, n_tokens)
        with g.at(far):  # only sums come back
            total = _sum_of_used(g, _results(g, w, "exps", there, chosen, moe), weights)
            total = g.sent(total, w["ffn_gate_inp.weight"], n_tokens)
    if moe.shared_ff_dim == 0:
        return total
    shared = feed_forward(g, w, x, suffix="_shexp")
    gate = g.sigmoid(g.mul_mat(w["ffn_gate_inp_shexp.weight"], x))  # [1, M]
    return g.add(total, g.mul(shared, gate))


def _hot_and_cold(
    g: GraphBuilder, w: BlockWeights, x: Tensor, chosen: Tensor, weights: Tensor, moe: MoeConfig
) -> Tensor:
    """The weighted sum of the chosen experts, each from the copies here or from where all of them are.

    Every pick is computed twice, once with a weight of zero: adding that changes nothing.
    """
    n_used, n_tokens = chosen.shape[0], chosen.shape[1]
    ids = g.reshape(g.cont(chosen), n_used * n_tokens)

    def looked_up(stack: str) -> tuple[Tensor, Tensor]:
        index = g.reshape(g.get_rows(w[f"{stack}.index"], ids), n_used, n_tokens)
        mask = g.reshape(g.get_rows(w[f"{stack}.mask"], ids), 1, n_used, n_tokens)
        return index, g.mul(weights, mask)

    (hot_ids, hot_weights), (cold_ids, cold_weights) = looked_up("hot"), looked_up("cold")
    with g.at(w["ffn_down_exps.weight"]):
        cold = _results(g, w, "exps", x, cold_ids, moe)
        cold = cold if g.near_links else g.mul(cold, cold_weights)
    hot = g.mul(_results(g, w, "hot", x, hot_ids, moe), hot_weights)
    cold = g.mul(cold, cold_weights) if g.near_links else cold
    return _sum_of_used(g, g.add(cold, hot))  # in this order the other device begins first


def _results(
    g: GraphBuilder, w: BlockWeights, stack: str, x: Tensor, chosen: Tensor, moe: MoeConfig
) -> Tensor:
    """Results of the chosen experts of a stack: [n_embd, n_used, M]."""
    n_embd, n_tokens = x.shape[0], x.shape[1]
    hidden = _expert_hidden(g, w, stack, g.reshape(x, n_embd, 1, n_tokens), chosen, moe)
    return _expert_linear(g, w, f"ffn_down_{stack}", hidden, chosen)


def _sum_of_used(g: GraphBuilder, out: Tensor, weights: Tensor | None = None) -> Tensor:
    """[n_embd, n_used, M], times weights [1, n_used, M], summed over the experts used, in their order:
    [n_embd, M]."""
    out = out if weights is None else g.mul(out, weights)
    n_embd, n_used, n_tokens, _ = out.shape
    stride, row = out.strides[1], out.strides[2]
    parts = [g.view(out, (n_embd, n_tokens), (row,), i * stride) for i in range(n_used)]
    for part in parts:
        g.expand(part)  # before the sums, which GPUs then make in one kernel
    total = parts[0]
    for part in parts[1:]:
        total = g.add(total, part)
    return total


def _expert_linear(g: GraphBuilder, w: BlockWeights, name: str, x: Tensor, chosen: Tensor) -> Tensor:
    """Products with the chosen experts, with a scale per expert where the file has them: [out, n_used, M]."""
    y = g.mul_mat_id(w[f"{name}.weight"], x, chosen)
    scale = w.get(f"{name}.scale")
    if scale is None:
        return y
    n_used, n_tokens = chosen.shape[0], chosen.shape[1]
    ids = g.reshape(g.cont(chosen), n_used * n_tokens)
    factors = g.get_rows(g.reshape(scale, 1, scale.shape[0]), ids)
    return g.mul(y, g.reshape(factors, 1, n_used, n_tokens))


def _expert_hidden(
    g: GraphBuilder, w: BlockWeights, stack: str, rows: Tensor, chosen: Tensor, moe: MoeConfig
) -> Tensor:
    """silu(gate) * up of the chosen experts: [ff_dim, n_used, M]."""
    if w.get(f"ffn_gate_up_{stack}.weight") is None:
        gate = _expert_linear(g, w, f"ffn_gate_{stack}", rows, chosen)
        return g.swiglu(gate, _expert_linear(g, w, f"ffn_up_{stack}", rows, chosen))
    both = _expert_linear(g, w, f"ffn_gate_up_{stack}", rows, chosen)  # [2 * ff_dim, n_used, M], gate first
    shape = (moe.ff_dim, both.shape[1], both.shape[2])
    strides = (both.strides[1], both.strides[2])
    gate, up = (g.cont(g.view(both, shape, strides, 4 * moe.ff_dim * i)) for i in range(2))
    return g.swiglu(gate, up)
