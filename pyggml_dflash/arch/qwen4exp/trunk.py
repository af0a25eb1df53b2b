"""The forward of qwen4exp: the order of its parts, and the state that each leaves behind. Layer 4."""

from __future__ import annotations

from pyggml_dflash.arch.base import GraphKey, State, Step
from pyggml_dflash.arch.blocks import apart, embed, head, last_row
from pyggml_dflash.arch.delta_net import delta_specs, gate_delta, run_delta
from pyggml_dflash.arch.experts import experts
from pyggml_dflash.arch.qwen4exp.config import Qwen4ExpConfig
from pyggml_dflash.arch.qwen4exp.indexer import AttentionForm
from pyggml_dflash.arch.qwen4exp.ngram import NgramConfig
from pyggml_dflash.arch.qwen4exp.ple import (
    PleRows,
    PleScan,
    histories,
    ple,
    ple_rows,
    ple_scan,
    slot_history,
)
from pyggml_dflash.arch.qwen4exp.sparse import IndexedKV, IndexStep, SparseLayer
from pyggml_dflash.arch.qwen4exp.streams import Mixed, feed_back, mix, mixer_specs, mixer_weights, spread
from pyggml_dflash.arch.qwen35 import attention_specs, expert_specs, gated_attention
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.weights import LoadedWeights, TensorSpec, matrix, vector

NGRAM_ROWS = "ngram.rows"  # input: the rows of the n-gram table, F32 [width, n_tokens]


def build_trunk(
    g: GraphBuilder, config: Qwen4ExpConfig, weights: LoadedWeights, state: State, step: Step
) -> Tensor | None:
    """Append a forward; see `Architecture.build`."""
    x = embed(g, weights, step)
    step.show("h_embed", x)
    residual = spread(g, config, x)
    index, parts = index_step(g, config, step), index_parts(g, config, step)
    last = config.n_layer - 1
    for i in range(config.n_layer):
        residual = g.sent(residual, weights[f"blk.{i}.hc_attn_norm.weight"], step.key.n_tokens)
        g.follow(weights[f"blk.{i}.hc_attn_norm.weight"])
        if config.ngram is not None and i == config.ngram.layer:
            residual = _add_ngrams(g, config, config.ngram, weights, state, step, residual)
        mixed = mix(g, mixer_weights(weights, f"blk.{i}.hc_attn_"), config, residual)
        y = _token_mixer(g, config, weights, i, mixed.x, state, step, index, parts)
        step.show(f"h_mixer{i}", y)
        if i < last:
            residual = layer_end(g, config, weights, i, mixed, y, step)
    if step.needs_all_rows:
        residual = layer_end(g, config, weights, last, mixed, y, step)
        step.capture_hidden(g, g.reshape(residual, config.hidden_width, residual.shape[2]))
        if not step.ends_alone:
            return None if step.key.output == "none" else _logits(g, config, weights, residual, step)
    elif step.key.output == "none":
        return None  # the state is written; nothing reads the rest
    residual = layer_end(g, config, weights, last, mixed.only(g, step), last_row(g, y, step), step)
    return _logits(g, config, weights, residual, step)


def _logits(
    g: GraphBuilder, config: Qwen4ExpConfig, weights: LoadedWeights, residual: Tensor, step: Step
) -> Tensor:
    """Those [n_vocab, rows] of the residual behind the last layer."""
    g.follow(weights["output_hc_norm.weight"])
    x = mix(g, mixer_weights(weights, "output_hc_"), config, residual).x
    step.show("h_final", x)
    return head(g, weights, x)


def layer_specs(file: TensorFile, layer: int, config: Qwen4ExpConfig, *, recurrent: bool) -> list[TensorSpec]:
    """The tensors of one layer but for those of the n-grams."""
    prefix, indexer = f"blk.{layer}.", config.indexer
    mixer = delta_specs(prefix, config) if recurrent else attention_specs(file, prefix, config)
    if not recurrent and config.ratios[layer]:
        mixer += [
            *matrix(f"{prefix}indexer.q_proj.weight", config.n_embd, indexer.n_head * indexer.head_dim),
            *matrix(f"{prefix}indexer.k_proj.weight", config.n_embd, indexer.head_dim),
            *(vector(f"{prefix}indexer.{x}_norm.weight", indexer.head_dim) for x in "qk"),
        ]
    return [
        *mixer_specs(file, f"{prefix}hc_attn_", config),
        *mixer,
        *mixer_specs(file, f"{prefix}hc_ffn_", config),
        *expert_specs(file, prefix, config),
    ]


def layer_end(
    g: GraphBuilder,
    config: Qwen4ExpConfig,
    weights: LoadedWeights,
    layer: int,
    mixed: Mixed,
    y: Tensor,
    step: Step,
) -> Tensor:
    """What follows the token mixer of a layer, whose output is y [D, M]: the residual behind the layer."""
    assert config.moe is not None
    residual = feed_back(g, mixer_weights(weights, f"blk.{layer}.hc_attn_"), mixed, y)
    w = mixer_weights(weights, f"blk.{layer}.hc_ffn_")
    mixed = mix(g, w, config, residual)
    y = experts(g, weights.block(layer), mixed.x, config.moe)
    step.show(f"h_ffn{layer}", y)
    residual = feed_back(g, w, mixed, y)
    step.show(f"h_layer{layer}", g.reshape(residual, config.hidden_width, residual.shape[2]))
    return residual


def _add_ngrams(
    g: GraphBuilder,
    config: Qwen4ExpConfig,
    ngram: NgramConfig,
    weights: LoadedWeights,
    state: State,
    step: Step,
    residual: Tensor,
) -> Tensor:
    key, w = step.key, weights.block(ngram.layer)
    rows = _ngram_rows(g, ngram, step)
    if step.stretches:
        return _add_stretches(g, config, ngram, weights, state, step, residual, rows)
    if step.slots is not None:
        history = histories(g, ngram, state, step.slots)
    else:
        history = slot_history(g, ngram, state, key.slot)
    scan: PleScan = ple(g, w, ngram, rows, residual, history, config.norm_eps)
    if step.slots is not None:
        scan.commit_slots(g, ngram, state, step.slots)
    elif key.update == "commit":
        scan.commit(g, history)
    else:
        assert step.record is not None
        scan.record(g, ngram, step.record)
    step.show(f"h_ple{ngram.layer}", g.reshape(scan.increment, config.hidden_width, key.n_tokens))
    return g.add(residual, scan.increment)


def _add_stretches(
    g: GraphBuilder,
    config: Qwen4ExpConfig,
    ngram: NgramConfig,
    weights: LoadedWeights,
    state: State,
    step: Step,
    residual: Tensor,
    rows: Tensor,
) -> Tensor:
    """Products over the rows of all slots, the convolution over each slot's from its own history."""
    module = ple_rows(g, weights.block(ngram.layer), ngram, rows, residual, config.norm_eps)
    total: Tensor | None = None
    for stretch in step.stretches:
        history = slot_history(g, ngram, state, stretch.slot)
        own = PleRows(stretch.rows(g, module.gated, 2), stretch.rows(g, module.columns))
        scan = ple_scan(g, weights.block(ngram.layer), ngram, own, history)
        scan.record(g, ngram, stretch.record)
        total = scan.increment if total is None else g.concat(total, scan.increment, 2)
    assert total is not None
    return g.add(residual, total)


def _ngram_rows(g: GraphBuilder, ngram: NgramConfig, step: Step) -> Tensor:
    """Rows of the n-gram table, F32 [width, M]."""
    if step.key.mixes_slots:
        return apart(g, step, lambda part, _: _ngram_rows(g, ngram, part))
    flat, n_tokens = step.extra[NGRAM_ROWS], step.key.n_tokens
    return g.view(flat, (ngram.width, n_tokens), (4 * ngram.width,), 0)


def index_step(g: GraphBuilder, config: Qwen4ExpConfig, step: Step) -> IndexStep | None:
    """The indexer's inputs; None where no layer is sparse, or rows are of several slots."""
    if not config.has_sparse_layers or step.key.mixes_slots:
        return None
    return IndexStep.of(g, step.extra, config.indexer, form_of(step.key), step.key)


def index_parts(g: GraphBuilder, config: Qwen4ExpConfig, step: Step) -> tuple[IndexStep, ...]:
    """The indexer's inputs of a step's parts; empty where no layer is sparse."""
    if not config.has_sparse_layers:
        return ()
    return tuple(
        IndexStep.of(g, part.extra, config.indexer, form_of(part.key), part.key) for part in step.parts
    )


def form_of(key: GraphKey) -> AttentionForm:
    """How the forward of a key attends."""
    return "masked" if key.form == "masked" else "gathered" if key.form == "gathered" else "dense"


def attention(
    g: GraphBuilder,
    config: Qwen4ExpConfig,
    weights: LoadedWeights,
    layer: int,
    x: Tensor,
    state: State,
    step: Step,
    index: IndexStep | None,
    parts: tuple[IndexStep, ...] = (),
) -> Tensor:
    """Attention over everything or over what the layer chooses: [head_dim * head, M]."""
    if config.ratios[layer] == 0:
        return gated_attention(g, config, weights, layer, x, state, step)
    cache = IndexedKV.of(state, layer, config)
    sparse = SparseLayer(config=config, indexer=config.indexer, w=weights.block(layer), cache=cache)
    return sparse.attention(g, x, step, index, parts)


def _token_mixer(
    g: GraphBuilder,
    config: Qwen4ExpConfig,
    weights: LoadedWeights,
    layer: int,
    x: Tensor,
    state: State,
    step: Step,
    index: IndexStep | None,
    parts: tuple[IndexStep, ...],
) -> Tensor:
    """A delta net or attention over x [D, M]: [D, M]."""
    w = weights.block(layer)
    if not config.recurrent[layer]:
        return w.linear(g, "attn_output", attention(g, config, weights, layer, x, state, step, index, parts))
    assert config.delta_net is not None
    outputs = run_delta(g, config, w, layer, x, state, step)
    gate = g.sigmoid(w.linear(g, "attn_gate", x))
    return w.linear(g, "ssm_out", gate_delta(g, w, outputs, config.delta_net, gate, config.norm_eps))
