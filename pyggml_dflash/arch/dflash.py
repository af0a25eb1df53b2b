"""The DFlash draft model, versions 1 and 2: a block of tokens in one forward. Layer 4.

A draft has no embedding and no head of its own; it reads the target's. What it knows of the text
are keys and values made from the target's layer inputs at committed positions (`build_inject`). A
forward (`build_block`) takes the newest token, which the target has not run yet, and mask tokens
behind it; row i proposes the token at its own position. Version 2 adds convolutions over the rows
of the block and scores candidates in pairs.

Cache cells are position modulo the size of the layer's cache: sliding layers keep a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml_dflash.arch.blocks import norm, rope_params
from pyggml_dflash.arch.dflash_config import ConvConfig, DraftConfig
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.weights import BlockWeights, LoadedWeights

NODES_PER_LAYER = 96


@dataclass(frozen=True, slots=True)
class DraftCache:
    """Keys and values of one layer, [kv_dim, cells] each."""

    k: Tensor
    v: Tensor


def build_inject(
    g: GraphBuilder,
    config: DraftConfig,
    weights: LoadedWeights,
    caches: list[DraftCache],
    features: Tensor,
    positions: Tensor,
    cells: list[Tensor],
) -> None:
    """Make committed rows visible: features F32 [n_embd * layers, n], I32 positions, I64 cells per layer."""
    n = features.shape[1]
    hidden = norm(
        g, g.mul_mat(weights["fc.weight"], features), weights["enc.output_norm.weight"], config.norm_eps
    )
    for i, cache in enumerate(caches):
        w = weights.block(i)
        k = _keys(g, config, w, hidden, positions)
        v = w.linear(g, "attn_v", hidden)
        for target, rows in ((cache.k, k), (cache.v, v)):
            g.expand(g.set_rows(target, g.reshape(rows, config.kv_dim, n), cells[i]))


def _keys(g: GraphBuilder, config: DraftConfig, w: BlockWeights, x: Tensor, positions: Tensor) -> Tensor:
    k = g.reshape(w.linear(g, "attn_k", x), config.head_dim, config.n_head_kv, x.shape[1])
    k = norm(g, k, w["attn_k_norm.weight"], config.norm_eps)
    return g.rope(k, positions, None, rope_params(config.rope))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInputs:
    """A block forward's inputs: rows F32 [n_embd, block], positions I32, per layer cells I64 and mask F16."""

    rows: Tensor
    positions: Tensor
    cells: list[Tensor]
    masks: list[Tensor]  # [n_kv, block]
    flash_attn: bool


def build_block(
    g: GraphBuilder,
    config: DraftConfig,
    weights: LoadedWeights,
    caches: list[DraftCache],
    inputs: BlockInputs,
) -> Tensor:
    """The block's last states, normalised: F32 [n_embd, block]; row 0 is the newest token's."""
    x = inputs.rows
    if config.embedding_scale != 1.0:
        x = g.scale(x, config.embedding_scale)
    for i, cache in enumerate(caches):
        w = weights.block(i)
        h = norm(g, x, w["attn_norm.weight"], config.norm_eps)
        h, conv = _convolve_in(g, config, w, "attn", h)
        h = _attention(g, config, w, cache, h, inputs, i)
        x = g.add(x, _convolve_out(g, config, w, "attn", h, conv))
        h = norm(g, x, w["ffn_norm.weight"], config.norm_eps)
        h, conv = _convolve_in(g, config, w, "ffn", h)
        h = w.linear(g, "ffn_down", g.swiglu(w.linear(g, "ffn_gate", h), w.linear(g, "ffn_up", h)))
        x = g.add(x, _convolve_out(g, config, w, "ffn", h, conv))
    return norm(g, x, weights["output_norm.weight"], config.norm_eps)


def _attention(
    g: GraphBuilder,
    config: DraftConfig,
    w: BlockWeights,
    cache: DraftCache,
    x: Tensor,
    inputs: BlockInputs,
    layer: int,
) -> Tensor:
    n, d = x.shape[1], config.head_dim
    q = g.reshape(w.linear(g, "attn_q", x), d, config.n_head, n)
    q = g.rope(
        norm(g, q, w["attn_q_norm.weight"], config.norm_eps), inputs.positions, None, rope_params(config.rope)
    )
    k, v = _keys(g, config, w, x, inputs.positions), w.linear(g, "attn_v", x)
    for target, rows in ((cache.k, k), (cache.v, v)):
        g.expand(g.set_rows(target, g.reshape(rows, config.kv_dim, n), inputs.cells[layer]))
    mask = inputs.masks[layer]
    out = _attend(g, config, q, cache, mask, inputs.flash_attn)
    out = w.linear(g, "attn_output", out)
    return out if config.value_scale == 1.0 else g.scale(out, config.value_scale)


def _attend(
    g: GraphBuilder, config: DraftConfig, q: Tensor, cache: DraftCache, mask: Tensor, flash_attn: bool
) -> Tensor:
    d, n_head, n, _ = q.shape
    n_kv = mask.shape[0]

    def seen(x: Tensor) -> Tensor:
        return g.view(x, (d, n_kv, config.n_head_kv), (x.strides[1], x.type.row_bytes(d)), 0)

    q, k, v = g.permute(q, 0, 2, 1, 3), seen(cache.k), seen(cache.v)
    if flash_attn:
        return g.reshape(g.flash_attn(q, k, v, mask, config.attn_scale), d * n_head, n)
    scores = g.soft_max(g.accumulate_f32(g.mul_mat(k, q)), mask, config.attn_scale)
    out = g.permute(g.mul_mat(g.cont(g.transpose(v)), scores), 0, 2, 1, 3)
    return g.cont_2d(out, d * n_head, n)


def _convolve_in(
    g: GraphBuilder, config: DraftConfig, w: BlockWeights, part: str, x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The convolved sub-layer input, and the coefficients that its output is convolved with too."""
    if config.conv is None:
        return x, None
    taps, groups = config.conv.n_taps, config.n_embd // config.conv.group_size
    both = g.reshape(w.linear(g, f"{part}_conv_proj", x), groups, taps, 2, x.shape[1])
    return _convolve(g, config.conv, x, both, w[f"{part}_conv_base"], side=0), both


def _convolve_out(
    g: GraphBuilder, config: DraftConfig, w: BlockWeights, part: str, x: Tensor, both: Tensor | None
) -> Tensor:
    if config.conv is None or both is None:
        return x
    return _convolve(g, config.conv, x, both, w[f"{part}_conv_base"], side=1)


def _convolve(
    g: GraphBuilder, conv: ConvConfig, x: Tensor, both: Tensor, base: Tensor, *, side: int
) -> Tensor:
    """Causal depthwise convolution over the rows of x [n_embd, n], rows before the first being zero.

    Channel c of tap t weighs base[side][t][c] + both[c // group_size, t, side, row].
    """
    n_embd, n = x.shape[0], x.shape[1]
    groups, size = both.shape[0], conv.group_size
    total: Tensor | None = None
    for tap in range(min(conv.n_taps, n)):
        rows = n - tap  # the tap reaches rows tap.. of the result
        offset = both.strides[1] * tap + both.strides[2] * side + both.strides[3] * tap
        dynamic = g.cont(g.view(both, (1, groups, rows), (both.strides[0], both.strides[3]), offset))
        fixed = g.view(base, (size, groups), (4 * size,), base.strides[1] * tap + base.strides[2] * side)
        weights = g.add(g.repeat(dynamic, size, groups, rows, 1), fixed)
        source = g.reshape(g.view(x, (n_embd, rows), (x.strides[1],), 0), size, groups, rows)
        term = g.reshape(g.mul(weights, source), n_embd, rows)
        if tap:
            term = g.pad_rows_before(term, tap)
        total = term if total is None else g.add(total, term)
    assert total is not None
    return total


def build_logits(g: GraphBuilder, config: DraftConfig, head: Tensor, hidden: Tensor) -> Tensor:
    """Logits F32 [n_vocab, rows] of normalised rows through the target's head, scaled and capped.

    What is built next runs where the head is, so that the logits stay there.
    """
    g.follow(head)
    logits = g.mul_mat(head, hidden)
    if config.logit_scale != 1.0:
        logits = g.scale(logits, config.logit_scale)
    if config.softcap:
        logits = g.scale(g.tanh(g.scale(logits, 1.0 / config.softcap)), config.softcap)
    return logits


def build_candidates(
    g: GraphBuilder,
    config: DraftConfig,
    weights: LoadedWeights,
    hidden: Tensor,
    logits: Tensor,
    anchor: Tensor,
) -> tuple[Tensor, Tensor]:
    """The best candidates of every row and how well each follows each candidate of the row before.

    hidden and logits of rows 1.. of a block; `anchor` I32 [n_candidates], the newest token repeated.
    Returns ids I32 [n_candidates, rows] and scores F32 [successor, predecessor, rows].
    """
    assert config.selector is not None
    n, rank = config.selector.n_candidates, config.selector.rank
    n_vocab, rows = logits.shape[0], logits.shape[1]
    ids = g.best_k(logits, n)
    unary = g.reshape(g.get_rows(g.reshape(logits, 1, n_vocab, rows), ids), n, 1, rows)
    g.follow(weights["selector_hidden.weight"])
    flat = g.reshape(ids, n * rows)
    successors = g.reshape(g.get_rows(weights["selector_successor.weight"], flat), rank, n, rows)
    table = weights["selector_predecessor.weight"]
    predecessors = g.reshape(g.get_rows(table, anchor), rank, n, 1)
    if rows > 1:
        before = g.get_rows(table, g.view(flat, (n * (rows - 1),), (), 0))
        predecessors = g.concat(predecessors, g.reshape(before, rank, n, rows - 1), 2)
    gate = g.reshape(g.mul_mat(weights["selector_hidden.weight"], hidden), rank, 1, rows)
    pairs = g.mul_mat(successors, g.mul(predecessors, gate))  # [successor, predecessor, rows]
    return ids, g.add(pairs, unary)


def max_nodes(config: DraftConfig) -> int:
    """An upper bound on the operations of one draft graph."""
    taps = 0 if config.conv is None else config.conv.n_taps
    return config.n_layer * (NODES_PER_LAYER + 40 * taps) + 256


def cache_type(type: ElementType, config: DraftConfig) -> ElementType:
    """The element type of the draft's cache; a quantised one needs whole blocks in a head."""
    return type if config.head_dim % type.block == 0 else ElementType.F16
