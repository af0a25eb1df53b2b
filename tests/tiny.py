"""Writes tiny random models of every registered architecture as GGUF files.

`Tiny` says what is in the file; its defaults make a model of some hundred thousand numbers that runs in
milliseconds. Everything a published file may or may not have is a field: head tied or not, projections fused
or apart, biases, an MTP block, several part files, other metadata, any element type for any tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from tests.reference.blocks import Bytes, encoded, random_tensor

Shape = tuple[int, ...]
TURN = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """What a tiny model is like; widths in elements. Fields of other architectures are not used."""

    architecture: str
    seed: int = 0
    n_embd: int = 64
    n_layer: int = 4  # of the trunk
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32  # not n_embd / n_head, so that a mix-up shows
    n_ff: int = 96
    n_vocab: int = 264  # rows of the table; the last ones have no token
    n_ctx_train: int = 1024
    rope_dims: int | None = None  # None: a quarter of the head with delta nets, else all of it
    rope_sections: tuple[int, ...] | None = (2, 1, 1, 0)
    interval: int = 2  # every so many layers one has attention
    net_head_dim: int = 16
    n_key_head: int = 2
    n_value_head: int = 4
    n_taps: int = 4
    n_expert: int = 4
    n_used: int = 2
    expert_ff: int = 32
    shared_ff: int = 48  # 0: no shared expert
    weight_scale: float = 0.0
    n_stream: int = 4  # of the residual
    low_rank: int = 12
    index_heads: int = 3
    index_dim: int = 24
    budget: int = 32  # tokens that sparse attention chooses
    ratio: int = 4  # tokens per pooled key; 0: attention is dense
    ngram_layer: int | None = None  # None: the last one with a delta net
    n_gram: int = 3
    ngram_heads: int = 2  # for each length from 2 to n_gram
    ngram_dim: int = 20  # a row of the table
    ngram_taps: int = 4
    ngram_sizes: tuple[int, ...] = (101, 103, 107, 109)
    n_mtp: int = 0
    tied: bool = False
    fused_qkv: bool = False  # in attention layers
    fused_ffn: bool = False  # gate and up in one tensor
    fused_experts: bool = False
    biases: bool = False
    scales: bool = False  # a scalar beside every matrix
    rope_factors: bool = False
    lists_recurrent: bool = True  # attention.recurrent_layers, beside the interval
    recurrent: tuple[bool, ...] | None = None  # per trunk layer; None: what the interval says
    metadata: Mapping[str, object] = field(default_factory=dict)  # after the prefix; None takes a key away
    elements: Mapping[str, ElementType] = field(default_factory=dict)  # by name or its end; '' for matrices
    shapes: Mapping[str, Shape | None] = field(default_factory=dict)  # by name; None takes the tensor away

    @property
    def has_delta_nets(self) -> bool:
        """True for the Qwen3.5 family and what came after it."""
        return self.architecture.startswith("qwen35") or self.has_streams

    @property
    def has_streams(self) -> bool:
        """True for qwen4exp: several residual streams, sparse attention, n-grams."""
        return self.architecture == "qwen4exp"

    @property
    def has_experts(self) -> bool:
        """True where the feed-forward part is routed."""
        return self.architecture.endswith("moe") or self.has_streams

    @property
    def n_rot(self) -> int:
        """Dimensions of a head that turn."""
        return self.rope_dims or (self.head_dim // 4 if self.has_delta_nets else self.head_dim)

    def is_recurrent(self, layer: int) -> bool:
        """True for a layer with a delta net."""
        if not self.has_delta_nets or layer >= self.n_layer:
            return False
        return (layer + 1) % self.interval != 0 if self.recurrent is None else self.recurrent[layer]

    @property
    def layer_of_ngrams(self) -> int | None:
        """The layer before which n-grams are added; None if there is none."""
        if not self.has_streams:
            return None
        recurrent = [i for i in range(self.n_layer) if self.is_recurrent(i)]
        return (recurrent[-1] if recurrent else None) if self.ngram_layer is None else self.ngram_layer


def write_tiny(folder: Path, tiny: Tiny, *, n_parts: int = 1) -> Path:
    """The model as a file, or as a set of files of which the first is returned."""
    writer, rng = GgufWriter(), np.random.default_rng(tiny.seed)
    for key, value in metadata(tiny).items():
        writer.set(key, value)
    for name, shape in tensor_shapes(tiny).items():
        element = _element(tiny, name, shape)
        writer.add_raw(name, _data(name, shape, element, rng), shape=shape, element=element)
    return writer.write(folder / f"{tiny.architecture}.gguf", n_parts=n_parts)[0]


def tokens(n: int, *, seed: int, n_vocab: int = 256) -> list[int]:
    """`n` random token ids."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, n)]


def metadata(tiny: Tiny) -> dict[str, object]:
    """Every key of the file."""
    keys: dict[str, object] = {
        "block_count": tiny.n_layer + tiny.n_mtp,
        "context_length": tiny.n_ctx_train,
        "embedding_length": tiny.n_embd,
        "attention.head_count": tiny.n_head,
        "attention.head_count_kv": tiny.n_head_kv,
        "attention.key_length": tiny.head_dim,
        "attention.value_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": tiny.n_rot,
        "rope.freq_base": 10000.0,
    }
    if tiny.has_delta_nets:
        keys |= _delta_net_keys(tiny)
    if tiny.has_experts:
        keys |= _expert_keys(tiny)
    else:
        keys["feed_forward_length"] = tiny.n_ff
    if tiny.has_streams:
        keys |= _stream_keys(tiny)
    named = {f"{tiny.architecture}.{key}": value for key, value in (keys | dict(tiny.metadata)).items()}
    everything = {"general.architecture": tiny.architecture, **_vocabulary(), **named}
    return {key: value for key, value in everything.items() if value is not None}


def _delta_net_keys(tiny: Tiny) -> dict[str, object]:
    keys: dict[str, object] = {
        "full_attention_interval": tiny.interval,
        "rope.dimension_sections": None if tiny.rope_sections is None else list(tiny.rope_sections),
        "ssm.conv_kernel": tiny.n_taps,
        "ssm.state_size": tiny.net_head_dim,
        "ssm.group_count": tiny.n_key_head,
        "ssm.time_step_rank": tiny.n_value_head,
        "ssm.inner_size": tiny.net_head_dim * tiny.n_value_head,
        "nextn_predict_layers": tiny.n_mtp or None,
    }
    if tiny.lists_recurrent:
        keys["attention.recurrent_layers"] = [tiny.is_recurrent(i) for i in range(tiny.n_layer + tiny.n_mtp)]
    return keys


def _expert_keys(tiny: Tiny) -> dict[str, object]:
    return {
        "expert_count": tiny.n_expert,
        "expert_used_count": tiny.n_used,
        "expert_feed_forward_length": tiny.expert_ff,
        "expert_shared_feed_forward_length": tiny.shared_ff,
        "expert_weights_scale": tiny.weight_scale or None,
    }


def _stream_keys(tiny: Tiny) -> dict[str, object]:
    n_all, sizes = tiny.n_layer + tiny.n_mtp, tiny.ngram_sizes
    multipliers = [2**54 - 33, 2**53 - 111, 2**52 - 47, 2**51 - 59]
    keys: dict[str, object] = {
        "hyper_connection.count": tiny.n_stream,
        "hyper_connection.low_rank": tiny.low_rank,
        "attention.indexer.head_count": tiny.index_heads,
        "attention.indexer.key_length": tiny.index_dim,
        "attention.indexer.top_k": tiny.budget,
        "attention.compress_ratios": [0 if tiny.is_recurrent(i) else tiny.ratio for i in range(n_all)],
    }
    if tiny.layer_of_ngrams is None:
        return keys
    return keys | {
        "ple.layers": [tiny.layer_of_ngrams],
        "ple.ngram_size": tiny.n_gram,
        "ple.heads_per_ngram": tiny.ngram_heads,
        "ple.conv_kernel": tiny.ngram_taps,
        "ple.eos_token_id": 257,
        "ple.layer_multipliers": np.array(multipliers[: tiny.n_gram], np.uint64),
        "ple.head_vocab_sizes": np.array(sizes, np.uint64),
        "ple.head_offsets": np.array([sum(sizes[:i]) for i in range(len(sizes))], np.uint64),
        "embedding_length_per_layer_input": tiny.ngram_dim,
    }


def _vocabulary() -> dict[str, object]:
    """A byte-level vocabulary: id = byte, and two control tokens."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]
    pairs = [f"{letters[ord(a)]} {letters[ord(b)]}" for a, b in ("th", "he")]
    texts = [*letters, *(pair.replace(" ", "") for pair in pairs), *TURN]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [1] * (len(texts) - 2) + [3, 3],
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.eos_token_id": texts.index("<|im_end|>"),
    }


def tensor_shapes(tiny: Tiny) -> dict[str, Shape]:
    """Every tensor of the file and its shape, in ggml order."""
    named: dict[str, Shape | None] = {"token_embd.weight": (tiny.n_embd, tiny.n_vocab)}
    if tiny.has_streams:
        named |= dict(_stream_mixer(tiny, "output_hc_", inject=False))
    else:
        named["output_norm.weight"] = (tiny.n_embd,)
    if tiny.layer_of_ngrams is not None:
        named["per_layer_token_embd.weight"] = (tiny.ngram_dim, sum(tiny.ngram_sizes) + 3)
    if not tiny.tied:
        named["output.weight"] = (tiny.n_embd, tiny.n_vocab)
    if tiny.rope_factors:
        named["rope_freqs.weight"] = (tiny.n_rot // 2,)
    for layer in range(tiny.n_layer + tiny.n_mtp):
        parts = [*_mixer(tiny, layer), *_feed_forward(tiny)]
        if layer >= tiny.n_layer:
            parts += _mtp(tiny)
        named |= {f"blk.{layer}.{name}": shape for name, shape in parts}
    named |= dict(tiny.shapes)
    return {name: shape for name, shape in named.items() if shape is not None}


def _matrix(tiny: Tiny, name: str, n_in: int, n_out: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (n_in, n_out)
    if tiny.biases:
        yield f"{name}.bias", (n_out,)
    if tiny.scales:
        yield f"{name}.scale", (1,)


def _mixer(tiny: Tiny, layer: int) -> Iterator[tuple[str, Shape]]:
    mixer = _delta_net(tiny) if tiny.is_recurrent(layer) else _attention(tiny)
    if tiny.has_streams:
        if layer == tiny.layer_of_ngrams:
            yield from _ngrams(tiny)
        yield from _stream_mixer(tiny, "hc_attn_")
        yield from mixer
        yield from _stream_mixer(tiny, "hc_ffn_")
        return
    yield "attn_norm.weight", (tiny.n_embd,)
    yield from mixer
    yield ("post_attention_norm.weight" if tiny.has_delta_nets else "ffn_norm.weight"), (tiny.n_embd,)


def _stream_mixer(tiny: Tiny, prefix: str, *, inject: bool = True) -> Iterator[tuple[str, Shape]]:
    wide = tiny.n_embd * tiny.n_stream
    yield f"{prefix}norm.weight", (wide,)
    yield from _matrix(tiny, f"{prefix}down", wide, tiny.low_rank)
    yield from _matrix(tiny, f"{prefix}up", tiny.low_rank, wide)
    if inject:
        yield from _matrix(tiny, f"{prefix}inject", wide, tiny.n_stream)


def _ngrams(tiny: Tiny) -> Iterator[tuple[str, Shape]]:
    wide, rows = tiny.n_embd * tiny.n_stream, tiny.ngram_dim * tiny.ngram_heads * (tiny.n_gram - 1)
    yield "ple_key.weight", (rows, wide)
    yield "ple_value.weight", (rows, tiny.n_embd)
    for name in ("key", "query", "conv"):
        yield f"ple_norm_{name}.weight", (wide,)
    yield "ple_conv1d.weight", (tiny.ngram_taps, wide)


def _attention(tiny: Tiny) -> Iterator[tuple[str, Shape]]:
    q_dim = tiny.n_head * tiny.head_dim * (2 if tiny.has_delta_nets else 1)
    kv_dim = tiny.n_head_kv * tiny.head_dim
    if tiny.fused_qkv:
        yield from _matrix(tiny, "attn_qkv", tiny.n_embd, q_dim + 2 * kv_dim)
    else:
        for name, width in (("attn_q", q_dim), ("attn_k", kv_dim), ("attn_v", kv_dim)):
            yield from _matrix(tiny, name, tiny.n_embd, width)
    if tiny.architecture != "llama":
        yield "attn_q_norm.weight", (tiny.head_dim,)
        yield "attn_k_norm.weight", (tiny.head_dim,)
    yield from _matrix(tiny, "attn_output", tiny.n_head * tiny.head_dim, tiny.n_embd)
    if tiny.has_streams:
        yield from _matrix(tiny, "indexer.q_proj", tiny.n_embd, tiny.index_heads * tiny.index_dim)
        yield from _matrix(tiny, "indexer.k_proj", tiny.n_embd, tiny.index_dim)
        yield "indexer.q_norm.weight", (tiny.index_dim,)
        yield "indexer.k_norm.weight", (tiny.index_dim,)


def _delta_net(tiny: Tiny) -> Iterator[tuple[str, Shape]]:
    value_dim = tiny.net_head_dim * tiny.n_value_head
    conv_dim = 2 * tiny.net_head_dim * tiny.n_key_head + value_dim
    yield from _matrix(tiny, "attn_qkv", tiny.n_embd, conv_dim)
    yield from _matrix(tiny, "attn_gate", tiny.n_embd, value_dim)
    yield "ssm_conv1d.weight", (tiny.n_taps, conv_dim)
    yield "ssm_dt.bias", (tiny.n_value_head,)
    yield "ssm_a", (tiny.n_value_head,)
    yield from _matrix(tiny, "ssm_alpha", tiny.n_embd, tiny.n_value_head)
    yield from _matrix(tiny, "ssm_beta", tiny.n_embd, tiny.n_value_head)
    yield "ssm_norm.weight", (tiny.net_head_dim,)
    yield from _matrix(tiny, "ssm_out", value_dim, tiny.n_embd)


def _feed_forward(tiny: Tiny) -> Iterator[tuple[str, Shape]]:
    if not tiny.has_experts:
        yield from _gated(tiny, "", tiny.n_ff)
        return
    n_embd, ff, n = tiny.n_embd, tiny.expert_ff, tiny.n_expert
    yield "ffn_gate_inp.weight", (n_embd, n)
    apart = {"gate_exps": (n_embd, ff, n), "up_exps": (n_embd, ff, n)}
    shapes = {"gate_up_exps": (n_embd, 2 * ff, n)} if tiny.fused_experts else apart
    for name, shape in {**shapes, "down_exps": (ff, n_embd, n)}.items():
        yield f"ffn_{name}.weight", shape
        if tiny.scales:
            yield f"ffn_{name}.scale", (n,)
    if tiny.shared_ff:
        yield "ffn_gate_inp_shexp.weight", (n_embd, 1)
        yield from _gated(tiny, "_shexp", tiny.shared_ff)


def _gated(tiny: Tiny, suffix: str, width: int) -> Iterator[tuple[str, Shape]]:
    fused = tiny.fused_ffn and not suffix
    if not fused:
        yield from _matrix(tiny, f"ffn_gate{suffix}", tiny.n_embd, width)
    yield from _matrix(tiny, f"ffn_up{suffix}", tiny.n_embd, 2 * width if fused else width)
    yield from _matrix(tiny, f"ffn_down{suffix}", width, tiny.n_embd)


def _mtp(tiny: Tiny) -> list[tuple[str, Shape]]:
    if tiny.has_streams:
        return [
            ("nextn.eh_proj.weight", (2 * tiny.n_embd, tiny.n_embd)),
            ("nextn.enorm.weight", (tiny.n_embd,)),
            ("nextn.hnorm.weight", (tiny.n_embd * tiny.n_stream,)),
            *_stream_mixer(tiny, "nextn.hc_head_", inject=False),
        ]
    norms = [(f"nextn.{name}.weight", (tiny.n_embd,)) for name in ("enorm", "hnorm", "shared_head_norm")]
    return [("nextn.eh_proj.weight", (2 * tiny.n_embd, tiny.n_embd)), *norms]


def _element(tiny: Tiny, name: str, shape: Shape) -> ElementType:
    """The longest end of the name that `elements` has; '' speaks for the matrices that quantisers touch."""
    found = max((end for end in tiny.elements if end and name.endswith(end)), key=len, default=None)
    if found is not None:
        return tiny.elements[found]
    return tiny.elements.get("", ElementType.F32) if is_quantisable(name, shape) else ElementType.F32


def is_quantisable(name: str, shape: Shape) -> bool:
    """True for a matrix that quantisers touch: not a convolution, not a router, not an n-gram table."""
    left_alone = ("conv1d.weight", "ffn_gate_inp.weight", "per_layer_token_embd.weight")
    return len(shape) > 1 and not name.endswith(left_alone)


def _data(name: str, shape: Shape, element: ElementType, rng: np.random.Generator) -> Bytes:
    """Random numbers of a size that keeps a forward lively: gates open and close, choices are clear."""
    if len(shape) > 1 and not name.endswith("conv1d.weight"):
        gain = 4.0 if name.endswith("ffn_gate_inp.weight") else 1.0
        spread = 1.0 if name.endswith("token_embd.weight") else gain / math.sqrt(shape[0])
        return random_tensor(element, shape, spread=spread, rng=rng)
    values = rng.standard_normal(shape[::-1])
    if name.endswith("ssm_a"):
        values = -np.exp(0.5 * values)
    elif name.endswith("conv1d.weight"):
        values = values / math.sqrt(shape[0])
    elif name.endswith((".scale", "norm.weight", "rope_freqs.weight")) or ".ple_norm_" in name:
        values = np.exp(0.2 * values)
    else:
        values = 0.3 * values
    return encoded(element, values.astype(np.float32))
