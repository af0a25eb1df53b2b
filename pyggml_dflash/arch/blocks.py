"""Building blocks that architectures share: norms, rotary attention, feed-forward. Layer 4.

Builders take tensors and return tensors. Shapes are ggml's, fastest dimension first; M is the number
of rows (tokens) of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pyggml_dflash.arch.base import State, Step
from pyggml_dflash.arch.tiled import attend_in_tiles, joined_heads, repeated_mask
from pyggml_dflash.ggml.ops import GraphBuilder, RopeParams
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig, RopeConfig
from pyggml_dflash.model.weights import EMBEDDING, HEAD, BlockWeights, LoadedWeights


def norm(g: GraphBuilder, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the fastest dimension, times `weight`."""
    return g.mul(g.rms_norm(x, eps), weight)


def embed(g: GraphBuilder, weights: LoadedWeights, step: Step) -> Tensor:
    """F32 [n_embd, M]: rows of the embedding table, gathered here or before."""
    if step.embeddings is not None:
        return step.embeddings
    assert step.tokens is not None
    return g.get_rows(weights[EMBEDDING], step.tokens)


def last_row(g: GraphBuilder, x: Tensor, step: Step) -> Tensor:
    """The last row of x [n, M], that of each joined prompt which ends, or all rows, as the output asks."""
    if step.key.output != "last" or step.key.n_tokens == 1:
        return x
    first, *others = (g.only(x, 1, row) for row in step.key.rows_with_logits)
    for other in others:
        first = g.concat(first, other, 1)
    return first


def head(g: GraphBuilder, weights: LoadedWeights, x: Tensor) -> Tensor:
    """Logits [n_vocab, rows] of normalised rows."""
    with g.at(weights[HEAD]):
        return g.mul_mat(weights[HEAD], x)


def rope_params(rope: RopeConfig) -> RopeParams:
    """The configuration in ggml's terms."""
    scaled = rope.scaling != "none"
    return RopeParams(
        n_dims=rope.n_dims,
        mode=0 if rope.pairs == "adjacent" else 2,
        freq_base=rope.freq_base,
        freq_scale=1.0 / rope.factor if scaled else 1.0,
        n_ctx_orig=rope.n_ctx_orig,
        ext_factor=rope.ext_factor,
        attn_factor=rope.attn_factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
    )


@dataclass(frozen=True, slots=True)
class KVView:
    """Keys and values of one layer, all slots: k and v [kv_dim, n_ctx, n_slots]."""

    k: Tensor
    v: Tensor
    head_dim: int
    n_head_kv: int
    _turned: dict[tuple[GraphBuilder, int, int], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, state: State, layer: int, config: ModelConfig) -> KVView:
        """The cache of `layer`."""
        return cls(state[f"blk.{layer}.k"], state[f"blk.{layer}.v"], config.head_dim, config.n_head_kv)

    def write(self, g: GraphBuilder, k: Tensor, v: Tensor, rows: Tensor) -> None:
        """Store new keys and values [head_dim, head_kv, M] at `rows`, counted over all slots.

        Nodes stand in the order in which GPU back ends fuse norm, rotation and store: rope, view, set_rows.
        """
        for cache, new in ((self.k, k), (self.v, v)):
            width, n_ctx, n_slots, _ = cache.shape
            flat = g.expand(g.reshape(cache, width, n_ctx * n_slots))
            new_rows = g.view(new, (width, rows.shape[0]), (new.strides[2],), 0)
            g.expand(g.set_rows(flat, new_rows, rows))

    def _read(self, g: GraphBuilder, cache: Tensor, step: Step) -> Tensor:
        _, row, slot, _ = cache.strides
        head = cache.type.row_bytes(self.head_dim)
        shape = (self.head_dim, step.key.n_kv, self.n_head_kv)
        return g.view(cache, shape, (row, head), step.key.slot * slot)

    def keys(self, g: GraphBuilder, step: Step) -> Tensor:
        """[head_dim, n_kv, head_kv] of the step's slot."""
        return self._read(g, self.k, step)

    def values(self, g: GraphBuilder, step: Step) -> Tensor:
        """[head_dim, n_kv, head_kv] of the step's slot."""
        return self._read(g, self.v, step)

    def turned_values(self, g: GraphBuilder, step: Step) -> Tensor:
        """[n_kv, head_dim, head_kv], a copy; rows of one slot that attend on their own share it."""
        span = g, step.key.slot, step.key.n_kv
        if span not in self._turned:
            self._turned[span] = g.cont(g.transpose(self.values(g, step)))
        return self._turned[span]


def apart(g: GraphBuilder, step: Step, mix: Callable[[Step, int], Tensor]) -> Tensor:
    """`mix(part, start)`, [n, rows], for each part, whose rows begin at `start`: [n, M]."""
    rows: Tensor | None = None
    for part, start in step.parts_from():
        own = mix(part, start)
        rows = own if rows is None else g.concat(rows, own, 1)
    assert rows is not None
    return rows


def read_slots(g: GraphBuilder, state: Tensor, size: int, slots: Tensor) -> Tensor:
    """Copies [size, M] of the parts of M slots of a recurrent F32 tensor, `size` elements each."""
    return g.get_rows(g.reshape(state, size, state.n_elements // size), slots)


def write_slots(g: GraphBuilder, state: Tensor, new: Tensor, slots: Tensor) -> None:
    """Overwrite the parts of M slots of a recurrent F32 tensor with new [size, M]."""
    size = new.shape[0]
    g.expand(g.set_rows(g.reshape(state, size, state.n_elements // size), new, slots))


def attend(
    g: GraphBuilder,
    q: Tensor,
    cache: KVView,
    step: Step,
    scale: float,
    mask: Tensor | None = None,
    max_visible: int = 0,
) -> Tensor:
    """Attention of q [head_dim, head, M] over the cache: [head_dim * head, M].

    `mask` stands for the step's own, and leaves at most `max_visible` cache rows to a row (0: unknown).
    """
    if step.parts:

        def alone(part: Step, start: int) -> Tensor:
            own = attend(g, g.some(q, 2, start, part.key.n_tokens), cache, part, scale)
            # GPUs keep keys and values as they read them behind what fused attention gives, until that is
            # read: a copy lets the next prompt have this memory.
            return g.cont(own) if start == 0 and step.key.joins_prompts else own

        return apart(g, step, alone)
    mask = step.mask if mask is None else mask
    assert mask is not None
    with g.at(cache.k):  # rows of the cache stay where they are
        return _attend(g, q, cache, step, scale, mask, max_visible)


def _attend(
    g: GraphBuilder, q: Tensor, cache: KVView, step: Step, scale: float, mask: Tensor, max_visible: int
) -> Tensor:
    head_dim, n_head, n_tokens, _ = q.shape
    q = g.permute(q, 0, 2, 1, 3)  # [head_dim, M, head]
    keys = cache.keys(g, step)
    if step.tile_masks is not None and g.has_tiles and joined_heads(n_tokens, n_head // cache.n_head_kv):
        repeated = repeated_mask(g, step, mask, n_head // cache.n_head_kv)
        return attend_in_tiles(g, q, keys, cache.values(g, step), repeated, scale)
    if step.flash_attn:
        out = g.flash_attn(q, keys, cache.values(g, step), mask, scale, max_visible)
        return g.reshape(out, head_dim * n_head, n_tokens)
    scores = g.accumulate_f32(g.mul_mat(keys, q))  # [n_kv, M, head]
    weights = g.soft_max(scores, mask, scale)
    out = g.permute(g.mul_mat(cache.turned_values(g, step), weights), 0, 2, 1, 3)
    return g.cont_2d(out, head_dim * n_head, n_tokens)


def project_qkv(
    g: GraphBuilder, w: BlockWeights, x: Tensor, config: ModelConfig, q_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [q_width, head, M] and keys, values [head_dim, head_kv, M], fused in the file or not."""
    n_tokens = x.shape[1]
    h, hkv, d = config.n_head, config.n_head_kv, config.head_dim
    if w.get("attn_qkv.weight") is None:
        q = g.reshape(w.linear(g, "attn_q", x), q_width, h, n_tokens)
        k = g.reshape(w.linear(g, "attn_k", x), d, hkv, n_tokens)
        v = g.reshape(w.linear(g, "attn_v", x), d, hkv, n_tokens)
        return q, k, v
    qkv = w.linear(g, "attn_qkv", x)
    row = qkv.strides[1]
    q = g.view(qkv, (q_width, h, n_tokens), (4 * q_width, row), 0)
    k = g.view(qkv, (d, hkv, n_tokens), (4 * d, row), 4 * q_width * h)
    v = g.view(qkv, (d, hkv, n_tokens), (4 * d, row), 4 * (q_width * h + d * hkv))
    return q, k, g.cont(v)


def feed_forward(
    g: GraphBuilder, w: BlockWeights, x: Tensor, prefix: str = "ffn", suffix: str = ""
) -> Tensor:
    """down(silu(gate x) * (up x)); a file may hold gate and up fused in `ffn_up`, gate first."""
    gate_name, up_name, down_name = f"{prefix}_gate{suffix}", f"{prefix}_up{suffix}", f"{prefix}_down{suffix}"
    if w.get(f"{gate_name}.weight") is not None:
        return w.linear(g, down_name, g.swiglu(w.linear(g, gate_name, x), w.linear(g, up_name, x)))
    both = w.linear(g, up_name, x)
    width, n_tokens = both.shape[0] // 2, both.shape[1]
    row = both.strides[1]
    gate, up = (g.cont(g.view(both, (width, n_tokens), (row,), 4 * width * i)) for i in range(2))
    return w.linear(g, down_name, g.swiglu(gate, up))


def decode(
    g: GraphBuilder,
    config: ModelConfig,
    weights: LoadedWeights,
    step: Step,
    *,
    mix: Callable[[int, Tensor], Tensor],
    feed: Callable[[BlockWeights, Tensor], Tensor],
    feed_norm: str,
) -> Tensor | None:
    """A whole decoder: `mix(layer, x)` mixes tokens and writes state, `feed(w, x)` works row by row.

    Both get rows [n_embd, M] that are normalised, and their results are added to the residual stream;
    `feed_norm` names the norm in front of `feed`. Returns what `Architecture.build` does.
    """

    def behind(layer: int, x: Tensor, h: Tensor) -> Tensor:
        """The residual behind a layer whose mixer gave h."""
        w, x = weights.block(layer), g.add(h, x)
        h = feed(w, norm(g, x, w[f"{feed_norm}.weight"], config.norm_eps))
        step.show(f"h_ffn{layer}", h)
        x = g.add(h, x)
        step.show(f"h_layer{layer}", x)
        return x

    def final(x: Tensor, h: Tensor) -> Tensor:
        """What the head reads."""
        g.follow(weights.block(config.n_layer - 1)["attn_norm.weight"])
        x = behind(config.n_layer - 1, x, h)
        g.follow(weights["output_norm.weight"])
        x = norm(g, x, weights["output_norm.weight"], config.norm_eps)
        step.show("h_final", x)
        return x

    x = embed(g, weights, step)
    step.show("h_embed", x)
    for i in range(config.n_layer):
        w = weights.block(i)
        x = g.sent(x, w["attn_norm.weight"], x.shape[1])
        g.follow(w["attn_norm.weight"])
        step.capture_layer(g, i, x)
        h = mix(i, norm(g, x, w["attn_norm.weight"], config.norm_eps))
        step.show(f"h_mixer{i}", h)
        if i < config.n_layer - 1:
            x = behind(i, x, h)
    if step.needs_all_rows:
        rows = final(x, h)
        step.capture_hidden(g, rows)
        if not step.ends_alone:
            return None if step.key.output == "none" else head(g, weights, rows)
    elif step.key.output == "none":
        return None  # the state is written; nothing reads the rest
    return head(g, weights, final(last_row(g, x, step), last_row(g, h, step)))
