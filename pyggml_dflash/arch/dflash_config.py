"""What a DFlash draft says in any form: its numbers, its tensors, and whether it fits its target. Layer 4."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml_dflash.errors import UnsupportedModelError
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ConfigReader, ModelConfig, RopeConfig
from pyggml_dflash.model.weights import TensorSpec, matrix, vector
from pyggml_dflash.options import DraftCausal

CONV_MARKER, SELECTOR_MARKER = "blk.0.attn_conv_base", "selector_hidden.weight"  # of version 2
MARKERS_OF_OTHERS = {
    "markov_w1.weight": "DSpark drafts",
    "blk.0.attn_sinks": "drafts with attention sinks",
    "blk.0.attn_sinks.weight": "drafts with attention sinks",
    "blk.0.attn_gate.weight": "gated draft variants",
    "blk.0.post_attention_norm.weight": "drafts with norms behind their branches",
    "token_embd.weight": "drafts with an embedding table of their own",
    "output.weight": "drafts with a head of their own",
    "d2t": "drafts with a smaller vocabulary",
}
# Names for `target_layers` in files of others, which count from the output of a layer or from its input.
OTHER_TARGET_LAYERS = ("dflash.target_layer_ids", "dflash.dflash.target_layer_ids")


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
    n_vocab: int  # tokens it was trained with; 0 where nothing says
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
    file: TensorFile, target: ModelConfig, causality: DraftCausal = "auto", *, n_tokens: int | None = None
) -> DraftConfig:
    """The draft's numbers, checked against themselves and against its target.

    `n_tokens`: tokens of the target's tokenizer, where they are fewer than rows of its embedding.
    """
    config = read_draft(file, causality)
    check_pair(ConfigReader(file, "dflash"), config, target, n_tokens)
    return config


def read_draft(file: TensorFile, causality: DraftCausal = "auto") -> DraftConfig:
    """The draft's numbers, checked against themselves; what this forward would leave out is refused."""
    r = ConfigReader(file, "dflash")
    for name, what in MARKERS_OF_OTHERS.items():
        if name in file.tensors:
            raise r.unsupported(f"{what} are not supported (tensor {file.shown(name)!r})")
    n_head, n_head_kv, head_dim = r.heads()
    n_layer = r.count("block_count", high=64)
    windows = _windows(r, n_layer)
    n_vocab = r.count("vocab_size", 0, low=0)
    config = DraftConfig(
        n_layer=n_layer,
        n_embd=r.count("embedding_length", high=2**20),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=r.count("feed_forward_length"),
        n_vocab=len(file.get_strs("tokenizer.ggml.tokens", [])) or n_vocab,
        norm_eps=r.number("attention.layer_norm_rms_epsilon", high=1.0),
        attn_scale=r.attn_scale(head_dim),
        rope=r.rope(head_dim, "halves"),
        block_size=r.count("block_size", 16, low=2, high=256),
        mask_token=file.get_int("tokenizer.ggml.mask_token_id"),
        target_layers=_target_layers(r),
        windows=windows,
        causal=_causal(r, windows, causality),
        conv=_conv(r),
        selector=_selector(r),
        logit_scale=r.number("logit_scale", 1.0, low=-1e6, high=1e6),
        softcap=r.number("final_logit_softcapping", 0.0, high=1e6),
        embedding_scale=r.number("embedding_scale", 1.0, low=-1e6, high=1e6),
        value_scale=r.number("attention.value_scale", 1.0, low=-1e6, high=1e6),
    )
    _check_known(r, config)
    return config


def _check_known(r: ConfigReader, config: DraftConfig) -> None:
    """Refuse what this forward would leave out: it would draft badly without a word."""
    activation = r.file.get_str(r.key("hidden_activation"), "silu")
    if activation != "silu":
        raise r.unsupported(f"{r.shown('hidden_activation')} is {activation!r}; known: silu")
    if (config.conv is None) != (config.selector is None):
        lacks = r.file.shown(CONV_MARKER if config.conv is None else SELECTOR_MARKER)
        raise r.damaged(f"DFlash 2 drafts have convolutions and a selector; tensor {lacks!r} is missing")
    if config.conv is not None:
        whole = config.n_embd % config.conv.group_size == 0
        r.demand(whole, f"{config.n_embd} channels are no whole number of groups of {config.conv.group_size}")
    known = {spec.name for spec in draft_tensors(config, 1)}
    for name in r.file.tensors:
        if name not in known:
            raise r.unsupported(f"tensor {r.file.shown(name)!r} of this draft is not supported")


def check_pair(r: ConfigReader, draft: DraftConfig, target: ModelConfig, n_tokens: int | None = None) -> None:
    """Refuse a draft that was made for another target, with the reason."""

    def refuse(text: str) -> UnsupportedModelError:
        return r.unsupported(f"this draft is for another target: {text}")

    if draft.n_embd != target.n_embd:
        raise refuse(f"its width is {draft.n_embd}, the target's {target.n_embd}")
    tokens = n_tokens or target.n_vocab
    if draft.n_vocab and draft.n_vocab not in (tokens, target.n_vocab):
        raise refuse(f"its vocabulary has {draft.n_vocab} tokens, the target's {tokens}")
    if not 0 <= draft.mask_token < target.n_vocab:
        raise refuse(f"its mask token is {draft.mask_token}, the target has {target.n_vocab} tokens")
    n_layer = r.count("target_block_count", target.n_layer)
    if n_layer != target.n_layer:
        raise refuse(
            f"it was made for {n_layer} layers ({r.shown('target_block_count')}), the target has "
            f"{target.n_layer}"
        )
    for layer in draft.target_layers:
        if not 1 <= layer < target.n_layer:
            raise refuse(
                f"it reads the input of layer {layer}; the target has layers 1 to {target.n_layer - 1}"
            )
    if draft.selector is not None and draft.selector.n_candidates > target.n_vocab:
        raise refuse(f"it has {draft.selector.n_candidates} candidates, the target {target.n_vocab} tokens")


def _target_layers(r: ConfigReader) -> tuple[int, ...]:
    """Target layers by their inputs, each once."""
    key = r.key("target_layers")
    other = next((k for k in OTHER_TARGET_LAYERS if k in r.file.metadata), None)
    if key not in r.file.metadata and other is not None:
        raise r.unsupported(
            f"{key} is missing, and {other} does not say whether it counts layers from their input or from "
            f"their output: convert the published folder with 'dflash convert-draft', or write {key}, which "
            f"counts inputs and so is one more than the published ids"
        )
    layers = tuple(r.file.get_ints(key))
    r.demand(bool(layers), f"{r.shown('target_layers')} is empty")
    r.demand(len(set(layers)) == len(layers), f"{r.shown('target_layers')} repeats a layer")
    return layers


def _windows(r: ConfigReader, n_layer: int) -> tuple[int, ...]:
    window = r.count("attention.sliding_window", 0, low=0)
    key = r.key("attention.sliding_window_pattern")
    sliding = r.file.get_bools(key, n=n_layer) if key in r.file.metadata else [window > 0] * n_layer
    r.demand(window > 0 or not any(sliding), f"{r.shown('attention.sliding_window')} is missing or 0")
    return tuple(window if slides else 0 for slides in sliding)


def _causal(r: ConfigReader, windows: tuple[int, ...], causality: DraftCausal) -> tuple[bool, ...]:
    key = r.key("attention.causal")
    if causality == "auto" and key in r.file.metadata:
        return (r.file.get_bool(key),) * len(windows)
    sliding = causality in ("auto", "swa")  # without a flag the published code makes sliding layers causal
    return tuple(causality == "all" or (sliding and window > 0) for window in windows)


def _conv(r: ConfigReader) -> ConvConfig | None:
    if CONV_MARKER not in r.file.tensors:
        return None
    return ConvConfig(
        n_taps=r.count("conv_kernel_size", high=64), group_size=r.count("conv_group_size", high=2**20)
    )


def _selector(r: ConfigReader) -> SelectorConfig | None:
    if SELECTOR_MARKER not in r.file.tensors:
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
