"""What a DFlash draft's file says: its numbers, its tensors, and whether it fits its target. Layer 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyggml_dflash.errors import UnsupportedModelError
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.config import ConfigReader, ModelConfig, RopeConfig
from pyggml_dflash.model.weights import TensorSpec, matrix, vector

Causality = Literal["auto", "none", "swa", "all"]
MARKERS_OF_OTHERS = {
    "markov_w1.weight": "DSpark drafts",
    "blk.0.attn_sinks": "drafts with attention sinks",
    "blk.0.attn_gate.weight": "gated draft variants",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """Dynamic convolutions of version 2: taps, and channels that share a dynamic coefficient."""

    n_taps: int
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """Candidate selector of version 2: rank of the pair scores, candidates per row."""

    rank: int
    n_candidates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """One draft; `target_layers` are the target's layers whose inputs it reads, in its own order."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int  # tokens of the tokenizer it was trained with; 0 when the file has none
    norm_eps: float
    attn_scale: float
    rope: RopeConfig
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    windows: tuple[int, ...]  # per layer: how far it sees back; 0: everything
    causal: tuple[bool, ...]  # per layer, within the block
    conv: ConvConfig | None
    selector: SelectorConfig | None
    logit_scale: float
    softcap: float
    embedding_scale: float
    value_scale: float

    @property
    def version(self) -> int:
        """1, or 2 with convolutions and candidate selector."""
        return 1 if self.selector is None else 2

    @property
    def kv_dim(self) -> int:
        """Width of one row of keys (or of values)."""
        return self.head_dim * self.n_head_kv


def read_draft_config(
    file: GgufFile, target: ModelConfig, causality: Causality = "auto", *, n_tokens: int | None = None
) -> DraftConfig:
    """The draft's numbers, checked against themselves and against its target.

    `n_tokens`: tokens of the target's tokenizer, where they are fewer than rows of its embedding.
    """
    r = ConfigReader(file, "dflash")
    for name, what in MARKERS_OF_OTHERS.items():
        if name in file.tensors:
            raise r.unsupported(f"{what} are not supported (tensor {name!r})")
    n_head, n_head_kv, head_dim = r.heads()
    n_layer = r.count("block_count", high=64)
    windows = _windows(r, n_layer)
    config = DraftConfig(
        n_layer=n_layer,
        n_embd=r.count("embedding_length", high=2**20),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=r.count("feed_forward_length"),
        n_vocab=len(file.get_strs("tokenizer.ggml.tokens", [])),
        norm_eps=r.number("attention.layer_norm_rms_epsilon", high=1.0),
        attn_scale=r.attn_scale(head_dim),
        rope=r.rope(head_dim, "halves"),
        block_size=r.count("block_size", 16, low=2, high=256),
        mask_token=file.get_int("tokenizer.ggml.mask_token_id"),
        target_layers=tuple(file.get_ints(r.key("target_layers"))),
        windows=windows,
        causal=_causal(r, windows, causality),
        conv=_conv(r),
        selector=_selector(r),
        logit_scale=r.number("logit_scale", 1.0, low=-1e6, high=1e6),
        softcap=r.number("final_logit_softcapping", 0.0, high=1e6),
        embedding_scale=r.number("embedding_scale", 1.0, low=-1e6, high=1e6),
        value_scale=r.number("attention.value_scale", 1.0, low=-1e6, high=1e6),
    )
    check_pair(r, config, target, n_tokens)
    _check_known(r, config, target)
    return config


def _check_known(r: ConfigReader, config: DraftConfig, target: ModelConfig) -> None:
    """Refuse what this forward would leave out: it would draft badly without a word."""
    activation = r.file.get_str(r.key("hidden_activation"), "silu")
    if activation != "silu":
        raise r.unsupported(f"{r.key('hidden_activation')} is {activation!r}; known: silu")
    known = {spec.name for spec in draft_tensors(config, target.n_vocab)}
    for name in r.file.tensors:
        if name not in known:
            raise r.unsupported(f"tensor {name!r} of this draft is not supported")


def check_pair(r: ConfigReader, draft: DraftConfig, target: ModelConfig, n_tokens: int | None = None) -> None:
    """Refuse a draft that was made for another target, with the reason."""

    def refuse(text: str) -> UnsupportedModelError:
        return r.unsupported(f"this draft is for another target: {text}")

    if draft.n_embd != target.n_embd:
        raise refuse(f"its width is {draft.n_embd}, the target's {target.n_embd}")
    tokens = n_tokens or target.n_vocab
    if draft.n_vocab and draft.n_vocab != tokens:
        raise refuse(f"its vocabulary has {draft.n_vocab} tokens, the target's {tokens}")
    if not 0 <= draft.mask_token < target.n_vocab:
        raise refuse(f"its mask token is {draft.mask_token}, the target has {target.n_vocab} tokens")
    r.demand(bool(draft.target_layers), f"{r.key('target_layers')} is empty")
    for layer in draft.target_layers:
        if not 1 <= layer < target.n_layer:
            raise refuse(
                f"it reads the input of layer {layer}; the target has layers 1 to {target.n_layer - 1}"
            )
    r.demand(
        len(set(draft.target_layers)) == len(draft.target_layers), f"{r.key('target_layers')} repeats a layer"
    )
    if draft.selector is not None and draft.selector.n_candidates > target.n_vocab:
        raise refuse(f"it has {draft.selector.n_candidates} candidates, the target {target.n_vocab} tokens")
    if draft.conv is not None:
        whole = draft.n_embd % draft.conv.group_size == 0
        r.demand(whole, f"{draft.n_embd} channels are no whole number of groups of {draft.conv.group_size}")


def _windows(r: ConfigReader, n_layer: int) -> tuple[int, ...]:
    window = r.count("attention.sliding_window", 0, low=0)
    key = r.key("attention.sliding_window_pattern")
    sliding = r.file.get_bools(key, n=n_layer) if key in r.file.metadata else [window > 0] * n_layer
    r.demand(window > 0 or not any(sliding), f"{r.key('attention.sliding_window')} is missing or 0")
    return tuple(window if slides else 0 for slides in sliding)


def _causal(r: ConfigReader, windows: tuple[int, ...], causality: Causality) -> tuple[bool, ...]:
    key = r.key("attention.causal")
    if causality == "auto" and key in r.file.metadata:
        return (r.file.get_bool(key),) * len(windows)
    sliding = causality in ("auto", "swa")  # without a flag the published code makes sliding layers causal
    return tuple(causality == "all" or (sliding and window > 0) for window in windows)


def _conv(r: ConfigReader) -> ConvConfig | None:
    if "blk.0.attn_conv_base" not in r.file.tensors:
        return None
    return ConvConfig(
        n_taps=r.count("conv_kernel_size", high=64), group_size=r.count("conv_group_size", high=2**20)
    )


def _selector(r: ConfigReader) -> SelectorConfig | None:
    if "selector_hidden.weight" not in r.file.tensors:
        return None
    rank, n = r.count("selector_rank", high=65536), r.count("selector_top_k", high=256)
    return SelectorConfig(rank=rank, n_candidates=n)


def draft_tensors(config: DraftConfig, n_vocab: int) -> list[TensorSpec]:
    """Every tensor of a draft for a target of `n_vocab` tokens."""
    n_embd, q_dim = config.n_embd, config.head_dim * config.n_head
    specs = [
        *matrix("fc.weight", n_embd * len(config.target_layers), n_embd),
        vector("enc.output_norm.weight", n_embd),
        vector("output_norm.weight", n_embd),
    ]
    for i in range(config.n_layer):
        p = f"blk.{i}."
        specs += [
            vector(f"{p}attn_norm.weight", n_embd),
            *matrix(f"{p}attn_q.weight", n_embd, q_dim),
            *matrix(f"{p}attn_k.weight", n_embd, config.kv_dim),
            *matrix(f"{p}attn_v.weight", n_embd, config.kv_dim),
            *matrix(f"{p}attn_output.weight", q_dim, n_embd),
            *(vector(f"{p}attn_{x}_norm.weight", config.head_dim) for x in "qk"),
            vector(f"{p}ffn_norm.weight", n_embd),
            *matrix(f"{p}ffn_gate.weight", n_embd, config.n_ff),
            *matrix(f"{p}ffn_up.weight", n_embd, config.n_ff),
            *matrix(f"{p}ffn_down.weight", config.n_ff, n_embd),
        ]
        if config.conv is not None:
            taps, groups = config.conv.n_taps, n_embd // config.conv.group_size
            for part in ("attn", "ffn"):
                specs.append(TensorSpec(f"{p}{part}_conv_base", (n_embd, taps, 2), "vector"))
                specs += matrix(f"{p}{part}_conv_proj.weight", n_embd, 2 * taps * groups)
    if config.selector is not None:
        rank = config.selector.rank
        specs += [
            *matrix("selector_hidden.weight", n_embd, rank),
            TensorSpec("selector_predecessor.weight", (rank, n_vocab), "table"),
            TensorSpec("selector_successor.weight", (rank, n_vocab), "table"),
        ]
    return specs
