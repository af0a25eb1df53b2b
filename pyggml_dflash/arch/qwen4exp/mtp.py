"""The multi-token-prediction block of qwen4exp: one more layer, over all residual streams. Layer 4.

A pair's embedding is added to each stream: the product of [embedding; stream] with one matrix. Then come
a whole layer with sparse attention over the pairs so far, and a final mixer of the block's own. What a
drafted token's pair reads is the residual behind the layer.

Published sources disagree in two places, which change how many drafts are accepted and never the text:
whether the hidden rows are normalised over all streams together (serving engines) or each stream on its
own (llama.cpp), and whether token 0 has a pair, with a hidden row of zeros (llama.cpp), or not.
`options.MtpConvention` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pyggml_dflash.arch.base import GraphKey, InputSizes, State, StateTensor, Step
from pyggml_dflash.arch.blocks import KVView, head, norm, project_qkv, rope_params
from pyggml_dflash.arch.qwen4exp.config import Qwen4ExpConfig
from pyggml_dflash.arch.qwen4exp.indexer import Span, attention_form, fill_index, index_inputs
from pyggml_dflash.arch.qwen4exp.sparse import IndexedKV, SparseLayer, index_state
from pyggml_dflash.arch.qwen4exp.streams import Mixed, mix, mixer_specs, mixer_weights, stream_vector
from pyggml_dflash.arch.qwen4exp.trunk import attention, form_of, index_step, layer_end, layer_specs
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.weights import EMBEDDING, LoadedWeights, TensorSpec, matrix, vector
from pyggml_dflash.options import MtpConvention


@dataclass(frozen=True, slots=True)
class StreamMtpBlock:
    """The block of a model with this configuration."""

    config: Qwen4ExpConfig
    convention: MtpConvention = "all-streams"

    @property
    def first_token(self) -> int:
        """See `MtpBlock.first_token`."""
        return 0 if self.convention == "llama.cpp" else 1

    @property
    def shift(self) -> int:
        """Pairs fill the cache from row 0 on, so that groups of them begin there."""
        return self.first_token

    @property
    def _layer(self) -> int:
        return self.config.n_layer

    @property
    def _is_sparse(self) -> bool:
        return self.config.ratios[self._layer] > 0

    def tensors(self, file: TensorFile) -> list[TensorSpec]:
        """See `MtpBlock.tensors`; table and head are the trunk's."""
        c, p = self.config, f"blk.{self._layer}."
        return [
            *layer_specs(file, self._layer, c, recurrent=False),
            *matrix(f"{p}nextn.eh_proj.weight", 2 * c.n_embd, c.n_embd),
            vector(f"{p}nextn.enorm.weight", c.n_embd),
            stream_vector(file, f"{p}nextn.hnorm.weight", c),
            *mixer_specs(file, f"{p}nextn.hc_head_", c, inject=False),
        ]

    def state(self, n_cells: int, type_k: ElementType, type_v: ElementType) -> tuple[StateTensor, ...]:
        """Keys, values, and what the indexer keeps."""
        p, width = f"blk.{self._layer}.", self.config.kv_dim
        kv = (
            StateTensor(name=f"{p}k", type=type_k, shape=(width, n_cells), grows=True),
            StateTensor(name=f"{p}v", type=type_v, shape=(width, n_cells), grows=True),
        )
        return (*kv, *index_state(self._layer, self.config.indexer, n_cells)) if self._is_sparse else kv

    def form(self, n_past: int, n_tokens: int, n_kv: int) -> str:
        """As in the trunk."""
        if not self._is_sparse:
            return ""
        return attention_form(self.config.indexer, n_past=n_past, n_tokens=n_tokens, n_kv=n_kv)

    def extra_inputs(self, max_rows: int, n_cells: int) -> InputSizes:
        """What the indexer reads; only pairs that are drafted choose, one at a time."""
        if not self._is_sparse:
            return {}
        indexer = self.config.indexer
        one = index_inputs(indexer, 1, n_cells)
        return index_inputs(indexer, max_rows, indexer.ratio) | {"index.mask": one["index.mask"]}

    def fill_inputs(
        self, arrays: Mapping[str, npt.NDArray[Any]], key: GraphKey, n_past: int, n_cells: int
    ) -> Mapping[str, int]:
        """See `MtpBlock.fill_inputs`."""
        if not self._is_sparse:
            return {}
        span = Span(n_past=n_past, n_tokens=key.n_tokens, n_kv=key.n_kv, slot=0, n_ctx=n_cells)
        return fill_index(arrays, self.config.indexer, form_of(key), span)

    def embed(self, g: GraphBuilder, weights: LoadedWeights, tokens: Tensor) -> Tensor:
        """From the target's table."""
        return g.get_rows(weights[EMBEDDING], tokens)

    def inject(
        self, g: GraphBuilder, weights: LoadedWeights, state: State, hidden: Tensor, step: Step
    ) -> None:
        """See `MtpBlock.inject`."""
        c, w = self.config, weights.block(self._layer)
        x = self._enter(g, weights, hidden, step).x
        _, k, v = project_qkv(g, w, x, c, 2 * c.head_dim)
        k = norm(g, k, w["attn_k_norm.weight"], c.norm_eps)
        k = g.rope(k, step.positions, None, rope_params(c.rope))
        KVView.of(state, self._layer, c).write(g, k, v, step.rows)
        index = index_step(g, c, step) if self._is_sparse else None
        if index is not None:
            cache = IndexedKV.of(state, self._layer, c)
            layer = SparseLayer(config=c, indexer=c.indexer, w=w, cache=cache)
            layer.write_keys(g, x, step.key.slot, index)

    def draft(
        self, g: GraphBuilder, weights: LoadedWeights, state: State, hidden: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """See `MtpBlock.draft`."""
        c, w = self.config, weights.block(self._layer)
        mixed = self._enter(g, weights, hidden, step)
        index = index_step(g, c, step) if self._is_sparse else None
        y = attention(g, c, weights, self._layer, mixed.x, state, step, index)
        residual = layer_end(g, c, weights, self._layer, mixed, w.linear(g, "attn_output", y), step)
        x = mix(g, mixer_weights(weights, f"blk.{self._layer}.nextn.hc_head_"), c, residual).x
        return head(g, weights, x), g.reshape(residual, c.hidden_width, residual.shape[2])

    def _enter(self, g: GraphBuilder, weights: LoadedWeights, hidden: Tensor, step: Step) -> Mixed:
        """What the layer reads of pairs of `step.embeddings` [n_embd, n] and `hidden` [hidden_width, n]."""
        c, w, n = self.config, weights.block(self._layer), hidden.shape[1]
        assert step.embeddings is not None
        gamma, shape = w["nextn.hnorm.weight"], (c.n_embd, c.n_stream, n)
        if self.convention == "all-streams":
            h = g.reshape(norm(g, hidden, g.reshape(gamma, c.hidden_width), c.norm_eps), *shape)
        else:
            streams = g.view(hidden, shape, (4 * c.n_embd, hidden.strides[1]), 0)
            h = norm(g, streams, g.reshape(gamma, c.n_embd, c.n_stream), c.norm_eps)
        e = norm(g, step.embeddings, w["nextn.enorm.weight"], c.norm_eps)
        pairs = g.concat(g.repeat(g.reshape(e, c.n_embd, 1, n), *shape, 1), h, 0)
        residual = w.linear(g, "nextn.eh_proj", pairs)  # [D, C, n]
        return mix(g, mixer_weights(weights, f"blk.{self._layer}.hc_attn_"), c, residual)
