"""Qwen3.5 family, dense (`qwen35`) and with experts (`qwen35moe`). Layer 4.

Three of four layers mix tokens with a gated delta net, whose state has a fixed size; the others are
attention with a gate on the output. Value heads are tiled over key heads, as the files store them.
An MTP block behind the trunk is checked and left alone.
"""

from __future__ import annotations

from collections.abc import Sized
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
from pyggml_dflash.arch.blocks import KVView, attend, decode, feed_forward, norm, project_qkv, rope_params
from pyggml_dflash.arch.delta_net import (
    commit_delta,
    delta_record,
    delta_specs,
    delta_state,
    gate_delta,
    run_delta,
)
from pyggml_dflash.arch.dense import ffn_specs, kv_tensors, outer_specs, qkv_specs
from pyggml_dflash.arch.experts import experts
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ConfigReader, DeltaNetConfig, ModelConfig, MoeConfig
from pyggml_dflash.model.weights import LoadedWeights, TensorSpec, matrix, vector

NODES_PER_LAYER = 96
NODES_PER_PART = 40  # what a row of a batch does alone in a layer, or one slot of a ragged forward


def recurrent_layers(r: ConfigReader, n_layer: int, n_all: int) -> tuple[bool, ...]:
    """Per trunk layer, whether it is a delta net: the file's list, else every layer but each k-th.

    Files differ in whether the list has the MTP layers behind the trunk too.
    """
    key = r.key("attention.recurrent_layers")
    if key in r.file.metadata:
        listed = r.file.metadata[key]
        of_trunk = isinstance(listed, Sized) and len(listed) == n_layer
        return tuple(r.file.get_bools(key, n=n_layer if of_trunk else n_all)[:n_layer])
    interval = r.count("full_attention_interval", 4, high=1024)
    return tuple((i + 1) % interval != 0 for i in range(n_layer))


def delta_net_config(r: ConfigReader) -> DeltaNetConfig:
    """The delta net's sizes, checked against each other."""
    net = DeltaNetConfig(
        head_dim=r.count("ssm.state_size", high=1024),
        n_key_head=r.count("ssm.group_count", high=4096),
        n_value_head=r.count("ssm.time_step_rank", high=4096),
        n_taps=r.count("ssm.conv_kernel", low=2, high=64),
    )
    inner = r.count("ssm.inner_size")
    r.demand(
        inner == net.value_dim, f"{r.key('ssm.inner_size')} is {inner}; heads and sizes make {net.value_dim}"
    )
    r.demand(
        net.n_value_head % net.n_key_head == 0,
        f"{net.n_value_head} value heads cannot share {net.n_key_head} key heads evenly",
    )
    return net


def moe_config(r: ConfigReader) -> MoeConfig:
    """The experts' sizes."""
    n_expert = r.count("expert_count", high=65536)
    n_used = r.count("expert_used_count", high=n_expert)
    n_ff = r.count("feed_forward_length", 0, low=0)
    return MoeConfig(
        n_expert=n_expert,
        n_used=n_used,
        ff_dim=r.count("expert_feed_forward_length", max(1, n_ff // n_used)),
        shared_ff_dim=r.count("expert_shared_feed_forward_length", n_ff, low=0),
        weight_scale=r.number("expert_weights_scale", 0.0, high=1e6),
    )


def check_sections(r: ConfigReader) -> None:
    """Positions of text are the same in every rotary section, so sections only have to make sense."""
    key = r.key("rope.dimension_sections")
    if key in r.file.metadata:
        sections = r.file.get_ints(key)
        r.demand(
            len(sections) in (3, 4) and sum(sections) > 0,
            f"{key} is {list(sections)}; expected 3 or 4 counts",
        )


def attention_specs(file: TensorFile, prefix: str, config: ModelConfig) -> list[TensorSpec]:
    """The tensors of gated attention."""
    return [
        *qkv_specs(file, prefix, config, 2 * config.head_dim),
        *(vector(f"{prefix}attn_{x}_norm.weight", config.head_dim) for x in "qk"),
        *matrix(f"{prefix}attn_output.weight", config.head_dim * config.n_head, config.n_embd),
    ]


def expert_specs(file: TensorFile, prefix: str, config: ModelConfig) -> list[TensorSpec]:
    """The tensors of a feed-forward part with experts."""
    moe, n_embd = config.moe, config.n_embd
    assert moe is not None
    n, ff = moe.n_expert, moe.ff_dim
    specs = [*matrix(f"{prefix}ffn_gate_inp.weight", n_embd, n)]
    if f"{prefix}ffn_gate_up_exps.weight" in file.tensors:
        shapes = {"gate_up": (n_embd, 2 * ff, n), "down": (ff, n_embd, n)}
    else:
        shapes = {"gate": (n_embd, ff, n), "up": (n_embd, ff, n), "down": (ff, n_embd, n)}
    for x, shape in shapes.items():
        specs.append(TensorSpec(f"{prefix}ffn_{x}_exps.weight", shape, "experts"))
        specs.append(vector(f"{prefix}ffn_{x}_exps.scale", n, required=False))
    if moe.shared_ff_dim:
        shared = moe.shared_ff_dim
        specs += [
            TensorSpec(f"{prefix}ffn_gate_inp_shexp.weight", (n_embd, 1), "matmul"),
            *matrix(f"{prefix}ffn_gate_shexp.weight", n_embd, shared),
            *matrix(f"{prefix}ffn_up_shexp.weight", n_embd, shared),
            *matrix(f"{prefix}ffn_down_shexp.weight", shared, n_embd),
        ]
    return specs


@dataclass(frozen=True, slots=True)
class Qwen35Architecture:
    """Hybrid decoder of gated delta nets and gated attention."""

    names: tuple[str, ...] = ("qwen35", "qwen35moe")
    supports_auto_ctx: bool = True

    def read_config(self, file: GgufFile, name: str) -> ModelConfig:
        """The model's numbers, checked."""
        r = ConfigReader(file, name)
        n_head, n_head_kv, head_dim = r.heads()
        n_all = r.count("block_count", high=1024)
        n_mtp = r.count("nextn_predict_layers", 0, low=0, high=16)
        r.demand(n_mtp < n_all, f"{n_mtp} MTP layers of {n_all} layers leave no trunk")
        if "blk.0.attn_norm.weight" not in file.tensors and n_mtp:
            raise r.unsupported(
                "this file holds only an MTP block; it goes beside its target, as a draft, not in its place"
            )
        check_sections(r)
        moe = moe_config(r) if name == "qwen35moe" else None
        return ModelConfig(
            architecture=name,
            n_layer=n_all - n_mtp,
            n_mtp=n_mtp,
            n_embd=r.count("embedding_length", high=2**20),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_ff=r.count("feed_forward_length") if moe is None else 0,
            n_vocab=r.n_vocab(),
            n_ctx_train=r.count("context_length", high=2**31 - 1),
            norm_eps=r.number("attention.layer_norm_rms_epsilon", high=1.0),
            attn_scale=r.attn_scale(head_dim),
            rope=r.rope(head_dim, "halves"),
            recurrent=recurrent_layers(r, n_all - n_mtp, n_all),
            delta_net=delta_net_config(r),
            moe=moe,
        )

    def tensors(self, config: ModelConfig, file: GgufFile) -> list[TensorSpec]:
        """Every tensor that a forward may use; the MTP block is not among them."""
        specs = outer_specs(config)
        for i in range(config.n_layer):
            prefix = f"blk.{i}."
            if config.recurrent[i]:
                specs += [*delta_specs(prefix, config), *self._shared_specs(file, prefix, config)]
            else:
                specs += self.attention_layer_tensors(file, prefix, config)
        return specs

    def attention_layer_tensors(self, file: TensorFile, prefix: str, config: ModelConfig) -> list[TensorSpec]:
        """Every tensor of one attention layer, its feed-forward part included."""
        return [*attention_specs(file, prefix, config), *self._shared_specs(file, prefix, config)]

    def _shared_specs(self, file: TensorFile, prefix: str, config: ModelConfig) -> list[TensorSpec]:
        dense = config.moe is None
        return [
            vector(f"{prefix}attn_norm.weight", config.n_embd),
            vector(f"{prefix}post_attention_norm.weight", config.n_embd),
            *(ffn_specs(file, prefix, config) if dense else expert_specs(file, prefix, config)),
        ]

    def state_layout(
        self, config: ModelConfig, n_ctx: int, type_k: ElementType, type_v: ElementType
    ) -> StateLayout:
        """Keys and values of attention layers; convolution window and memory of delta nets, in F32."""
        tensors = [*kv_tensors(config, n_ctx, type_k, type_v), *delta_state(config)]
        return StateLayout(n_ctx=n_ctx, tensors=tuple(tensors))

    def max_nodes(self, config: ModelConfig, n_parts: int = 0) -> int:
        """An upper bound on the operations of one forward."""
        extra = 0 if config.moe is None else 72 + 2 * config.moe.n_used  # with copies of hot experts
        extra += 0 if config.delta_net is None else 5 * config.delta_net.n_taps  # a composed convolution
        return (NODES_PER_LAYER + extra + NODES_PER_PART * n_parts) * config.n_layer + 128

    def build(
        self, g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, state: State, step: Step
    ) -> Tensor | None:
        """Append a forward; see `Architecture.build`."""
        moe = config.moe
        return decode(
            g,
            config,
            weights,
            step,
            mix=lambda i, x: self._mixer(g, config, weights, i, x, state, step),
            feed=lambda w, x: feed_forward(g, w, x) if moe is None else experts(g, w, x, moe),
            feed_norm="post_attention_norm",
        )

    def _mixer(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        weights: LoadedWeights,
        layer: int,
        x: Tensor,
        state: State,
        step: Step,
    ) -> Tensor:
        w = weights.block(layer)
        if not config.recurrent[layer]:
            return w.linear(g, "attn_output", gated_attention(g, config, weights, layer, x, state, step))
        net = config.delta_net
        assert net is not None
        outputs = run_delta(g, config, w, layer, x, state, step)
        z = g.silu(w.linear(g, "attn_gate", x))
        return w.linear(g, "ssm_out", gate_delta(g, w, outputs, net, z, config.norm_eps))

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
        """Windows and states after every row, or the rows that the recurrences were fed with."""
        return delta_record(config, update, width)

    def build_commit(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        weights: LoadedWeights,
        state: State,
        record: Record,
        commit: Commit,
    ) -> None:
        """Copy the state after `n_keep` rows, or run the recurrences again over those rows."""
        commit_delta(g, config, weights, state, record, commit)


def gated_attention(
    g: GraphBuilder,
    config: ModelConfig,
    weights: LoadedWeights,
    layer: int,
    x: Tensor,
    state: State,
    step: Step,
) -> Tensor:
    """Attention whose output is multiplied by sigmoid(gate), per head: [head_dim * head, M].

    The query projection holds, head by head, the query rows and then the gate rows.
    """
    w, d, n_tokens = weights.block(layer), config.head_dim, x.shape[1]
    both, k, v = project_qkv(g, w, x, config, 2 * d)  # [2 * head_dim, head, M]
    shape, strides = (d, config.n_head, n_tokens), (both.strides[1], both.strides[2])
    q, gate = g.view(both, shape, strides, 0), g.view(both, shape, strides, 4 * d)

    params = rope_params(config.rope)
    q = g.rope(norm(g, q, w["attn_q_norm.weight"], config.norm_eps), step.positions, None, params)
    k = g.rope(norm(g, k, w["attn_k_norm.weight"], config.norm_eps), step.positions, None, params)
    cache = KVView.of(state, layer, config)
    cache.write(g, k, v, step.rows)
    out = attend(g, q, cache, step, config.attn_scale)
    gate = g.cont_2d(gate, d * config.n_head, n_tokens)
    return g.mul(out, g.sigmoid(gate))
