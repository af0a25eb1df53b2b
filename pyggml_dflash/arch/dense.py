"""Plain decoders: `llama` and `qwen3`. Every layer is attention and a feed-forward part. Layer 4."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml_dflash.arch.base import (
    Commit,
    Feeder,
    InputSizes,
    Record,
    State,
    StateLayout,
    StateTensor,
    StateUpdate,
    Step,
)
from pyggml_dflash.arch.blocks import (
    KVView,
    attend,
    decode,
    feed_forward,
    norm,
    project_qkv,
    rope_params,
)
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ConfigReader, ModelConfig, RopePairs
from pyggml_dflash.model.weights import EMBEDDING, HEAD, LoadedWeights, TensorSpec, matrix, vector

NODES_PER_LAYER = 64  # qwen3 without fused attention, with biases and scales everywhere: 53
NODES_PER_PART = 24  # what a row of a batch does alone in a layer: 18 without fused attention


def kv_tensors(
    config: ModelConfig, n_ctx: int, type_k: ElementType, type_v: ElementType
) -> list[StateTensor]:
    """Keys and values of every attention layer."""
    found: list[StateTensor] = []
    for i in config.attention_layers:
        for which, type in (("k", type_k), ("v", type_v)):
            found.append(
                StateTensor(name=f"blk.{i}.{which}", type=type, shape=(config.kv_dim, n_ctx), grows=True)
            )
    return found


def qkv_specs(file: TensorFile, prefix: str, config: ModelConfig, q_width: int) -> list[TensorSpec]:
    """Query, key and value projections as the file has them, fused or apart."""
    n_embd, q_dim, kv_dim = config.n_embd, q_width * config.n_head, config.kv_dim
    if f"{prefix}attn_qkv.weight" in file.tensors:
        return [*matrix(f"{prefix}attn_qkv.weight", n_embd, q_dim + 2 * kv_dim)]
    return [
        *matrix(f"{prefix}attn_q.weight", n_embd, q_dim),
        *matrix(f"{prefix}attn_k.weight", n_embd, kv_dim),
        *matrix(f"{prefix}attn_v.weight", n_embd, kv_dim),
    ]


def ffn_specs(file: TensorFile, prefix: str, config: ModelConfig) -> list[TensorSpec]:
    """The dense feed-forward part, with gate and up apart or fused in `ffn_up`."""
    n_embd, n_ff = config.n_embd, config.n_ff
    down = matrix(f"{prefix}ffn_down.weight", n_ff, n_embd)
    if f"{prefix}ffn_gate.weight" not in file.tensors and f"{prefix}ffn_up.weight" in file.tensors:
        return [*matrix(f"{prefix}ffn_up.weight", n_embd, 2 * n_ff), *down]
    return [
        *matrix(f"{prefix}ffn_gate.weight", n_embd, n_ff),
        *matrix(f"{prefix}ffn_up.weight", n_embd, n_ff),
        *down,
    ]


def outer_specs(config: ModelConfig) -> list[TensorSpec]:
    """Embedding table, last norm and head; a file without a head ties it to the table."""
    return [
        TensorSpec(EMBEDDING, (config.n_embd, config.n_vocab), "rows"),
        vector("output_norm.weight", config.n_embd),
        TensorSpec(HEAD, (config.n_embd, config.n_vocab), "matmul", required=False),
    ]


@dataclass(frozen=True, slots=True)
class DenseArchitecture:
    """A decoder without recurrent layers; flags say what sets one family apart."""

    names: tuple[str, ...]
    rope_pairs: RopePairs
    head_norms: bool  # queries and keys are normalised per head
    supports_auto_ctx: bool = True

    def read_config(self, file: GgufFile, name: str) -> ModelConfig:
        """The model's numbers, checked."""
        r = ConfigReader(file, name)
        n_head, n_head_kv, head_dim = r.heads()
        if r.count("expert_count", 0, low=0) > 0:
            raise r.unsupported(f"{name} with experts is not supported; {name} without them is")
        n_layer = r.count("block_count", high=1024)
        return ModelConfig(
            architecture=name,
            n_layer=n_layer,
            n_mtp=0,
            n_embd=r.count("embedding_length", high=2**20),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_ff=r.count("feed_forward_length"),
            n_vocab=r.n_vocab(),
            n_ctx_train=r.count("context_length", high=2**31 - 1),
            norm_eps=r.number("attention.layer_norm_rms_epsilon", high=1.0),
            attn_scale=r.attn_scale(head_dim),
            rope=r.rope(head_dim, self.rope_pairs),
            recurrent=(False,) * n_layer,
        )

    def tensors(self, config: ModelConfig, file: GgufFile) -> list[TensorSpec]:
        """Every tensor that a forward may use."""
        specs = outer_specs(config)
        specs.append(vector("rope_freqs.weight", config.rope.n_dims // 2, required=False))
        for i in range(config.n_layer):
            prefix = f"blk.{i}."
            specs += [
                vector(f"{prefix}attn_norm.weight", config.n_embd),
                *qkv_specs(file, prefix, config, config.head_dim),
                *matrix(f"{prefix}attn_output.weight", config.head_dim * config.n_head, config.n_embd),
                vector(f"{prefix}ffn_norm.weight", config.n_embd),
                *ffn_specs(file, prefix, config),
            ]
            if self.head_norms:
                specs += [vector(f"{prefix}attn_{x}_norm.weight", config.head_dim) for x in "qk"]
        return specs

    def state_layout(
        self, config: ModelConfig, n_ctx: int, type_k: ElementType, type_v: ElementType
    ) -> StateLayout:
        """Keys and values only."""
        return StateLayout(n_ctx=n_ctx, tensors=tuple(kv_tensors(config, n_ctx, type_k, type_v)))

    def max_nodes(self, config: ModelConfig, n_parts: int = 0) -> int:
        """An upper bound on the operations of one forward."""
        return (NODES_PER_LAYER + NODES_PER_PART * n_parts) * config.n_layer + 128

    def build(
        self, g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, state: State, step: Step
    ) -> Tensor | None:
        """Append a forward; see `Architecture.build`."""
        return decode(
            g,
            config,
            weights,
            step,
            mix=lambda i, x: self._attention(g, config, weights, i, x, state, step),
            feed=lambda w, x: feed_forward(g, w, x),
            feed_norm="ffn_norm",
        )

    def form(self, config: ModelConfig, n_past: int, n_tokens: int, n_kv: int, *, host: bool) -> str:
        """Always the same."""
        return ""

    def extra_inputs(self, config: ModelConfig, max_rows: int, max_kv: int) -> InputSizes:
        """None."""
        return {}

    def feeder(self, config: ModelConfig, weights: LoadedWeights) -> Feeder | None:
        """Nothing to fill."""
        return None

    def record_tensors(self, config: ModelConfig, update: StateUpdate, width: int) -> tuple[StateTensor, ...]:
        """Nothing: rows of the cache behind `n_past` are written again."""
        return ()

    def build_commit(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        weights: LoadedWeights,
        state: State,
        record: Record,
        commit: Commit,
    ) -> None:
        """Nothing to do: there is no recurrent state."""

    def _attention(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        weights: LoadedWeights,
        layer: int,
        x: Tensor,
        state: State,
        step: Step,
    ) -> Tensor:
        w, params, factors = weights.block(layer), rope_params(config.rope), weights.get("rope_freqs.weight")
        q, k, v = project_qkv(g, w, x, config, config.head_dim)
        if self.head_norms:
            q = norm(g, q, w["attn_q_norm.weight"], config.norm_eps)
            k = norm(g, k, w["attn_k_norm.weight"], config.norm_eps)
        q = g.rope(q, step.positions, factors, params)
        k = g.rope(k, step.positions, factors, params)
        cache = KVView.of(state, layer, config)
        cache.write(g, k, v, step.rows)
        return w.linear(g, "attn_output", attend(g, q, cache, step, config.attn_scale))


LLAMA = DenseArchitecture(("llama",), rope_pairs="adjacent", head_norms=False)
QWEN3 = DenseArchitecture(("qwen3",), rope_pairs="halves", head_norms=True)
