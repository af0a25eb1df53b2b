"""The multi-token-prediction block of the Qwen3.5 family: one more layer that proposes a token. Layer 4.

Row p combines the embedding of the token at position p with what the target's head read at p - 1,
and predicts the token at p + 1. Its keys and values have a cache of their own. Pairs start at
position 1: there is no state before the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from pyggml_dflash.arch.base import GraphKey, InputSizes, State, StateTensor, Step
from pyggml_dflash.arch.blocks import KVView, feed_forward, norm, project_qkv, rope_params
from pyggml_dflash.arch.experts import experts
from pyggml_dflash.arch.qwen35 import Qwen35Architecture, gated_attention, moe_config
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ConfigReader, ModelConfig
from pyggml_dflash.model.weights import EMBEDDING, HEAD, LoadedWeights, TensorSpec, matrix, vector


def mtp_tensors(config: ModelConfig, file: TensorFile) -> list[TensorSpec]:
    """Tensors of the block behind the trunk; empty if the file has none."""
    if config.n_mtp == 0:
        return []
    n_embd, p = config.n_embd, f"blk.{config.n_layer}."
    table = (n_embd, config.n_vocab)
    block = Qwen35Architecture()
    return [
        *matrix(f"{p}nextn.eh_proj.weight", 2 * n_embd, n_embd),
        vector(f"{p}nextn.enorm.weight", n_embd),
        vector(f"{p}nextn.hnorm.weight", n_embd),
        vector(f"{p}nextn.shared_head_norm.weight", n_embd, required=False),
        TensorSpec(f"{p}nextn.embed_tokens.weight", table, "rows", required=False),
        TensorSpec(f"{p}nextn.shared_head_head.weight", table, "matmul", required=False),
        *block.attention_layer_tensors(file, p, config),
    ]


def check_side(r: ConfigReader, what: str, own: object, wanted: object) -> None:
    """Raise if the file of an MTP block says otherwise than the target it is to go with."""
    if own != wanted:
        raise r.unsupported(
            f"this MTP block is for another target: its {what} is {own}, the target's {wanted}"
        )


def check_side_block(r: ConfigReader, target: ModelConfig, n_tokens: int) -> None:
    """The checks on the file of an MTP block that every family has; see `read_side_block`."""
    file = r.file
    check_side(r, "architecture", r.architecture, target.architecture)
    n_mtp = r.count("nextn_predict_layers", high=16)
    if n_mtp > 1:
        raise r.unsupported(f"{n_mtp} MTP blocks; one is supported")
    n_before = r.count("block_count", high=1024) - n_mtp
    check_side(r, "number of layers before it", n_before, target.n_layer)
    check_side(r, "width", r.count("embedding_length", high=2**20), target.n_embd)
    check_side(r, "rotary positions", r.rope(target.head_dim, "halves"), target.rope)
    own_eps = r.number("attention.layer_norm_rms_epsilon", high=1.0)
    check_side(r, "norm epsilon", own_eps, target.norm_eps)
    own_tokens = len(file.get_strs("tokenizer.ggml.tokens", [])) or n_tokens
    check_side(r, "vocabulary", own_tokens, n_tokens)
    table = file.tensors.get(EMBEDDING)  # a copy that some tools add, in whatever type
    if table is not None:
        check_side(r, "embedding table", list(table.shape), [target.n_embd, target.n_vocab])


def read_side_block(file: TensorFile, target: ModelConfig, n_tokens: int) -> ModelConfig:
    """The target's configuration, with the MTP block that `file` brings, checked to be made for it.

    The file may be one that holds only the block, or a whole model with the block. Its own copies of the
    target's embedding table, last norm and head are not used. `n_tokens`: tokens of the target's tokenizer.
    """
    r = ConfigReader(file, file.get_str("general.architecture"))
    check_side_block(r, target, n_tokens)
    own_heads, heads = r.heads(), (target.n_head, target.n_head_kv, target.head_dim)
    check_side(r, "heads, KV heads and head size", own_heads, heads)
    if target.moe is None:
        check_side(r, "feed-forward width", r.count("feed_forward_length"), target.n_ff)
    else:
        check_side(r, "set of experts", moe_config(r), target.moe)
    return replace(target, n_mtp=1)


def mtp_config(config: ModelConfig) -> ModelConfig:
    """The block as a model of one more layer, which is attention."""
    return replace(config, n_layer=config.n_layer + 1, recurrent=(*config.recurrent, False))


def _combine(
    g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, rows: Tensor, hidden: Tensor
) -> Tensor:
    w = weights.block(config.n_layer)
    e = norm(g, rows, w["nextn.enorm.weight"], config.norm_eps)
    h = norm(g, hidden, w["nextn.hnorm.weight"], config.norm_eps)
    return w.linear(g, "nextn.eh_proj", g.concat(e, h, 0))


def mtp_embed(g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, tokens: Tensor) -> Tensor:
    """Embedding rows F32 [n_embd, n] from the block's own table or the target's."""
    own = weights.get(f"blk.{config.n_layer}.nextn.embed_tokens.weight")
    return g.get_rows(weights[EMBEDDING] if own is None else own, tokens)


def build_mtp_inject(
    g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, cache: KVView, rows: Tensor, hidden: Tensor,
    positions: Tensor, cells: Tensor,
) -> None:  # fmt: skip
    """Write keys and values of committed pairs: embedding rows and hidden rows F32 [n_embd, n]."""
    w = weights.block(config.n_layer)
    x = norm(g, _combine(g, config, weights, rows, hidden), w["attn_norm.weight"], config.norm_eps)
    _, k, v = project_qkv(g, w, x, config, 2 * config.head_dim)
    k = g.rope(
        norm(g, k, w["attn_k_norm.weight"], config.norm_eps), positions, None, rope_params(config.rope)
    )
    cache.write(g, k, v, cells)


def build_mtp_step(
    g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, state: State, rows: Tensor,
    hidden: Tensor, step: Step,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One pair through the block: (logits [n_vocab, n], the hidden rows that the next step reads)."""
    layer = config.n_layer
    w = weights.block(layer)
    x = _combine(g, config, weights, rows, hidden)
    h = norm(g, x, w["attn_norm.weight"], config.norm_eps)
    h = gated_attention(g, config, weights, layer, h, state, step)
    x = g.add(w.linear(g, "attn_output", h), x)
    h = norm(g, x, w["post_attention_norm.weight"], config.norm_eps)
    x = g.add(feed_forward(g, w, h) if config.moe is None else experts(g, w, h, config.moe), x)
    own_norm = w.get("nextn.shared_head_norm.weight")
    x = norm(g, x, weights["output_norm.weight"] if own_norm is None else own_norm, config.norm_eps)
    own_head = w.get("nextn.shared_head_head.weight")
    head = weights[HEAD] if own_head is None else own_head
    with g.at(head):
        return g.mul_mat(head, x), x


@dataclass(frozen=True, slots=True)
class Qwen35MtpBlock:
    """The block of a model with this configuration. Cache row 0 stays empty, as pairs start at position 1."""

    config: ModelConfig
    first_token: int = 1
    shift: int = 0

    def tensors(self, file: TensorFile) -> list[TensorSpec]:
        """See `MtpBlock.tensors`."""
        return mtp_tensors(self.config, file)

    def state(self, n_cells: int, type_k: ElementType, type_v: ElementType) -> tuple[StateTensor, ...]:
        """Keys and values."""
        p, width = f"blk.{self.config.n_layer}.", self.config.kv_dim
        return (
            StateTensor(name=f"{p}k", type=type_k, shape=(width, n_cells), grows=True),
            StateTensor(name=f"{p}v", type=type_v, shape=(width, n_cells), grows=True),
        )

    def form(self, n_past: int, n_tokens: int, n_kv: int) -> str:
        """Always the same."""
        return ""

    def extra_inputs(self, max_rows: int, n_cells: int) -> InputSizes:
        """None."""
        return {}

    def fill_inputs(
        self, arrays: Mapping[str, npt.NDArray[Any]], key: GraphKey, n_past: int, n_cells: int
    ) -> Mapping[str, int]:
        """Nothing to fill."""
        return {}

    def embed(self, g: GraphBuilder, weights: LoadedWeights, tokens: Tensor) -> Tensor:
        """From the block's own table or the target's."""
        return mtp_embed(g, self.config, weights, tokens)

    def inject(
        self, g: GraphBuilder, weights: LoadedWeights, state: State, hidden: Tensor, step: Step
    ) -> None:
        """See `MtpBlock.inject`."""
        assert step.embeddings is not None
        cache = KVView.of(state, self.config.n_layer, mtp_config(self.config))
        build_mtp_inject(g, self.config, weights, cache, step.embeddings, hidden, step.positions, step.rows)

    def draft(
        self, g: GraphBuilder, weights: LoadedWeights, state: State, hidden: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """See `MtpBlock.draft`."""
        assert step.embeddings is not None
        return build_mtp_step(g, self.config, weights, state, step.embeddings, hidden, step)
