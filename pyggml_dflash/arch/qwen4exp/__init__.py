"""Qwen3.8-Flash-Next (`qwen4exp`): streams of residuals, delta nets, sparse attention, n-grams. Layer 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pyggml_dflash.arch.base import (
    Commit,
    FedRows,
    Feeder,
    InputSizes,
    Record,
    State,
    StateLayout,
    StateTensor,
    StateUpdate,
    Step,
)
from pyggml_dflash.arch.delta_net import commit_delta, delta_record, delta_state
from pyggml_dflash.arch.dense import kv_tensors
from pyggml_dflash.arch.qwen4exp.config import Qwen4ExpConfig, read_config
from pyggml_dflash.arch.qwen4exp.indexer import (
    MAX_TAKEN_BACK,
    Span,
    attention_form,
    fill_index,
    index_inputs,
)
from pyggml_dflash.arch.qwen4exp.ngram import NgramReader
from pyggml_dflash.arch.qwen4exp.ple import commit_ple, ple_record, ple_specs, ple_state
from pyggml_dflash.arch.qwen4exp.sparse import index_state, max_part_nodes, max_sparse_nodes
from pyggml_dflash.arch.qwen4exp.streams import mixer_specs
from pyggml_dflash.arch.qwen4exp.trunk import NGRAM_ROWS, build_trunk, form_of, layer_specs
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import EMBEDDING, HEAD, LoadedWeights, TensorSpec

NODES_PER_LAYER = 200  # with copies of hot experts
NODES_PER_PART = 40  # what a row of a batch does alone in a layer that is not sparse


def settings(config: ModelConfig) -> Qwen4ExpConfig:
    """The configuration with this family's own numbers."""
    assert isinstance(config, Qwen4ExpConfig)
    return config


class HostInputs:
    """What forwards read that is computed on the host: rows of the n-gram table, the indexer's inputs."""

    def __init__(self, config: Qwen4ExpConfig, weights: LoadedWeights) -> None:
        self._config = config
        self._ngrams = None if config.ngram is None else NgramReader(config.ngram, weights.file)

    def fill(self, arrays: Mapping[str, npt.NDArray[Any]], rows: FedRows) -> Mapping[str, int]:
        """See `Feeder.fill`."""
        counts: dict[str, int] = {}
        if self._ngrams is not None and self._config.ngram is not None and not rows.apart:
            n = len(rows.tokens) * self._config.ngram.width
            self._ngrams.read(rows.tokens, rows.before, arrays[NGRAM_ROWS][:n])
            counts[NGRAM_ROWS] = n
        if self._config.has_sparse_layers:
            key = rows.key
            span = Span(
                n_past=rows.n_past, n_tokens=key.n_tokens, n_kv=key.n_kv, slot=key.slot, n_ctx=rows.n_ctx
            )
            counts |= fill_index(arrays, self._config.indexer, form_of(key), span)
        return counts

    def expect(self, tokens: Sequence[int], before: Sequence[int]) -> None:
        """Read the table's rows for a chunk to come."""
        if self._ngrams is not None:
            self._ngrams.expect(tokens, before)

    def close(self) -> None:
        """End reading ahead."""
        if self._ngrams is not None:
            self._ngrams.close()


@dataclass(frozen=True, slots=True)
class Qwen4ExpArchitecture:
    """Hybrid decoder over several residual streams."""

    names: tuple[str, ...] = ("qwen4exp",)
    supports_auto_ctx: bool = True

    def read_config(self, file: GgufFile, name: str) -> ModelConfig:
        """The model's numbers, checked."""
        return read_config(file, name)

    def tensors(self, config: ModelConfig, file: GgufFile) -> list[TensorSpec]:
        """Every tensor that a forward may use; the n-gram table and the MTP block are not among them."""
        c = settings(config)
        specs = [
            TensorSpec(EMBEDDING, (c.n_embd, c.n_vocab), "rows"),
            *mixer_specs(file, "output_hc_", c, inject=False),
            TensorSpec(HEAD, (c.n_embd, c.n_vocab), "matmul", required=False),
        ]
        if c.ngram is not None:
            specs += ple_specs(file, c.ngram, c.n_embd, c.n_stream)
        for i in range(c.n_layer):
            specs += layer_specs(file, i, c, recurrent=c.recurrent[i])
        return specs

    def state_layout(
        self, config: ModelConfig, n_ctx: int, type_k: ElementType, type_v: ElementType
    ) -> StateLayout:
        """Caches of attention layers and their indexers, state of delta nets, the n-grams' history."""
        c = settings(config)
        tensors = [*kv_tensors(c, n_ctx, type_k, type_v), *delta_state(c)]
        for i in c.sparse_layers:
            tensors += index_state(i, c.indexer, n_ctx)
        if c.ngram is not None:
            tensors.append(ple_state(c.ngram, c.n_embd, c.n_stream))
        return StateLayout(n_ctx=n_ctx, tensors=tuple(tensors))

    def max_nodes(self, config: ModelConfig, n_parts: int = 0) -> int:
        """An upper bound on the operations of one forward."""
        c = settings(config)
        assert c.moe is not None
        assert c.delta_net is not None
        more = 2 * c.moe.n_used + 5 * c.delta_net.n_taps + 8 * c.n_stream
        sparse = (max_sparse_nodes(c.indexer) + n_parts * max_part_nodes(c.indexer)) * len(c.sparse_layers)
        return (NODES_PER_LAYER + more + NODES_PER_PART * n_parts) * c.n_layer + sparse + 256

    def build(
        self, g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, state: State, step: Step
    ) -> Tensor | None:
        """Append a forward; see `Architecture.build`."""
        return build_trunk(g, settings(config), weights, state, step)

    def form(self, config: ModelConfig, n_past: int, n_tokens: int, n_kv: int, *, host: bool) -> str:
        """Attention over everything, through a mask, or over copies of what was chosen."""
        c = settings(config)
        if not c.has_sparse_layers:
            return ""
        return attention_form(c.indexer, n_past=n_past, n_tokens=n_tokens, n_kv=n_kv, host=host)

    def extra_inputs(self, config: ModelConfig, max_rows: int, max_kv: int) -> InputSizes:
        """Rows of the n-gram table; what the indexer reads."""
        c, found = settings(config), {}
        if c.ngram is not None:
            found[NGRAM_ROWS] = (ElementType.F32, c.ngram.width * max_rows)
        return found | (index_inputs(c.indexer, max_rows, max_kv) if c.has_sparse_layers else {})

    def feeder(self, config: ModelConfig, weights: LoadedWeights) -> Feeder | None:
        """What reads the n-gram table."""
        return HostInputs(settings(config), weights)

    def record_tensors(self, config: ModelConfig, update: StateUpdate, width: int) -> tuple[StateTensor, ...]:
        """What the delta nets and the n-grams' convolution need to be taken back."""
        c = settings(config)
        assert width <= MAX_TAKEN_BACK, "the indexer's ring holds no more rows that may be taken back"
        found = list(delta_record(c, update, width))
        if c.ngram is not None:
            found.append(ple_record(c.ngram, c.n_embd, c.n_stream, width))
        return tuple(found)

    def build_commit(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        weights: LoadedWeights,
        state: State,
        record: Record,
        commit: Commit,
    ) -> None:
        """Bring delta nets and the n-grams' history to the first `n_keep` rows of a recorded forward."""
        c = settings(config)
        commit_delta(g, c, weights, state, record, commit)
        if c.ngram is not None:
            commit_ple(g, c.ngram, state, record, commit)
