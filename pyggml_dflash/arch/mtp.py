"""The multi-token-prediction block of the Qwen3.5 family: one more layer that proposes a token. Layer 4.

Row p combines the embedding of the token at position p with what the target's head read at p - 1,
and predicts the token at p + 1. Its keys and values have a cache of their own. Pairs start at
position 1: there is no state before the first token.
"""

from __future__ import annotations

from dataclasses import replace

from pyggml_dflash.arch.base import GraphKey, Step
from pyggml_dflash.arch.blocks import KVView, experts, feed_forward, norm, project_qkv, rope_params
from pyggml_dflash.arch.qwen35 import Qwen35Architecture, gated_attention
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import EMBEDDING, HEAD, LoadedWeights, TensorSpec, matrix, vector


def mtp_tensors(config: ModelConfig, file: GgufFile) -> list[TensorSpec]:
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
    g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, state: dict[str, Tensor], rows: Tensor,
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
    return g.mul_mat(weights[HEAD] if own_head is None else own_head, x), x


def mtp_step(
    g: GraphBuilder, n: int, n_kv: int, positions: Tensor, cells: Tensor, mask: Tensor, flash_attn: bool
) -> Step:
    """The inputs of `n` rows in the terms that attention understands."""
    key = GraphKey(n_tokens=n, n_kv=n_kv, slot=0, output="all")
    return Step(
        key=key,
        tokens=None,
        embeddings=None,
        positions=positions,
        rows=cells,
        mask=mask,
        flash_attn=flash_attn,
    )
