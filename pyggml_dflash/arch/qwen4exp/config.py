"""The metadata of qwen4exp: read, and checked before anything is allocated. Layer 4."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.arch.qwen4exp.indexer import MAX_RATIO, IndexerConfig
from pyggml_dflash.arch.qwen4exp.ngram import NgramConfig, read_ngram_config
from pyggml_dflash.arch.qwen35 import check_sections, delta_net_config, recurrent_layers
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.model.config import ConfigReader, ModelConfig, MoeConfig

log = logging.getLogger(__name__)

PUBLISHED: Final = (
    "mtp.",
    "model.layers.",
    "model.language_model.",
    "lm_head.",
)  # the checkpoint's own names
PRECISE: Final = frozenset({ElementType.F32, ElementType.F16, ElementType.BF16, ElementType.Q8_0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen4ExpConfig(ModelConfig):
    """One model; `ratios` says per layer, MTP blocks included, how it attends: 0 to every earlier row."""

    n_stream: int  # residual streams
    low_rank: int  # of the gates that mix them
    indexer: IndexerConfig
    ratios: tuple[int, ...]
    ngram: NgramConfig | None

    @property
    def hidden_width(self) -> int:
        """All streams of the residual, side by side."""
        return self.n_embd * self.n_stream

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Trunk layers that choose what they attend to."""
        return tuple(i for i in self.attention_layers if self.ratios[i])

    @property
    def has_sparse_layers(self) -> bool:
        """True if any layer, an MTP block included, chooses what it attends to."""
        return any(self.ratios)


def read_config(file: GgufFile, name: str) -> Qwen4ExpConfig:
    """The model's numbers, checked against each other and against the tensor table."""
    r = ConfigReader(file, name)
    _check_names(r)
    n_all = r.count("block_count", high=1024)
    n_mtp = r.count("nextn_predict_layers", 0, low=0, high=16)
    r.demand(n_mtp < n_all, f"{n_mtp} MTP layers of {n_all} layers leave no trunk")
    n_layer = n_all - n_mtp
    _check_trunk(r, n_layer)
    recurrent = recurrent_layers(r, n_layer, n_all)
    attention = [i for i in range(n_layer) if not recurrent[i]]
    n_head = layer_count(r, "attention.head_count", attention, n_layer, n_all, high=4096)
    n_head_kv = n_head
    if r.has("attention.head_count_kv"):
        n_head_kv = layer_count(r, "attention.head_count_kv", attention, n_layer, n_all, high=4096)
    n_embd = r.count("embedding_length", high=2**20)
    head_dim = _head_dim(r, n_head, n_head_kv, n_embd)
    check_sections(r)
    rope = r.rope(head_dim, "halves")
    n_stream, low_rank = (
        r.count("hyper_connection.count", low=2, high=64),
        r.count("hyper_connection.low_rank"),
    )
    ratios = _ratios(r, n_layer, n_all)
    n_vocab = r.n_vocab()
    config = Qwen4ExpConfig(
        architecture=name,
        n_layer=n_layer,
        n_mtp=n_mtp,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=0,
        n_vocab=n_vocab,
        n_ctx_train=r.count("context_length", high=2**31 - 1),
        norm_eps=r.number("attention.layer_norm_rms_epsilon", high=1.0),
        attn_scale=r.attn_scale(head_dim),
        rope=rope,
        recurrent=recurrent,
        delta_net=delta_net_config(r),
        moe=moe_config(r, n_layer, n_all),
        n_stream=n_stream,
        low_rank=low_rank,
        indexer=_indexer(r, ratios, rope.n_dims),
        ratios=ratios,
        ngram=read_ngram_config(r, recurrent, n_vocab),
    )
    _warn_of_dense_attention(config, file)
    _warn_of_coarse_mixers(file)
    return config


def _check_names(r: ConfigReader) -> None:
    """Tensors must have GGUF's names."""
    other = next((name for name in r.file.tensors if name.startswith(PUBLISHED)), None)
    if other is not None:
        raise r.unsupported(
            f"tensor {other!r} has the published checkpoint's name; convert the checkpoint with a converter "
            "that renames tensors (blk.0.attn_qkv.weight, and blk.48.nextn.eh_proj.weight for the MTP block)"
        )


def _check_trunk(r: ConfigReader, n_layer: int) -> None:
    """A file with an MTP block alone is no model."""
    if any(name.startswith("blk.0.") for name in r.file.tensors):
        return
    if any(name.startswith(f"blk.{n_layer}.") for name in r.file.tensors):
        raise r.unsupported(
            "this file holds only an MTP block; it goes beside its target, as a draft, not in its place"
        )


def layer_ints(r: ConfigReader, name: str, n_layer: int, n_all: int) -> list[int]:
    """A number per layer; files give it once, for the trunk, or for the MTP layers too."""
    listed = r.file.metadata.get(r.key(name))
    n = n_layer if isinstance(listed, Sized) and len(listed) == n_layer else n_all
    return r.file.get_ints(r.key(name), n=n)


def layer_count(
    r: ConfigReader, name: str, layers: Iterable[int], n_layer: int, n_all: int, *, high: int
) -> int:
    """A count that is the same for all of `layers`; what a list says of other layers does not matter."""
    values = layer_ints(r, name, n_layer, n_all)
    found = sorted({values[i] for i in layers} or set(values))
    if len(found) > 1:
        raise r.unsupported(f"{r.key(name)} differs between layers: {found}; one value is supported")
    r.demand(1 <= found[0] <= high, f"{r.key(name)} is {found[0]}; expected 1 to {high}")
    return found[0]


def _head_dim(r: ConfigReader, n_head: int, n_head_kv: int, n_embd: int) -> int:
    head_dim = r.count("attention.key_length", max(1, n_embd // n_head), high=8192)
    value_dim = r.count("attention.value_length", head_dim, high=8192)
    r.demand(n_head % n_head_kv == 0, f"{n_head} heads cannot share {n_head_kv} KV heads evenly")
    if head_dim != value_dim:
        raise r.unsupported(f"key heads of {head_dim} and value heads of {value_dim} differ")
    return head_dim


def moe_config(r: ConfigReader, n_layer: int, n_all: int) -> MoeConfig:
    """The experts."""
    n_expert = r.count("expert_count", high=65536)
    return MoeConfig(
        n_expert=n_expert,
        n_used=r.count("expert_used_count", high=n_expert),
        ff_dim=layer_count(r, "expert_feed_forward_length", range(n_layer), n_layer, n_all, high=2**24),
        shared_ff_dim=r.count("expert_shared_feed_forward_length", low=0),
        weight_scale=r.number("expert_weights_scale", 0.0, high=1e6),
    )


def _ratios(r: ConfigReader, n_layer: int, n_all: int) -> tuple[int, ...]:
    """Tokens per pooled key, for each layer; 0 where a layer attends to everything."""
    name = "attention.compress_ratios"
    if not r.has(name):
        return (0,) * n_all
    values = layer_ints(r, name, n_layer, n_all)
    r.demand(min(values) >= 0, f"{r.key(name)} has {min(values)}; expected 0 or a number of tokens")
    used = sorted(set(values) - {0})
    if len(used) > 1:
        raise r.unsupported(f"{r.key(name)} has {used}; one ratio beside 0 is supported")
    if used:
        r.demand(used[0] > 1, f"{r.key(name)} is {used[0]}; expected 0, or more than 1")
        if used[0] > MAX_RATIO or used[0] & (used[0] - 1):
            raise r.unsupported(f"{r.key(name)} is {used[0]}; powers of two up to {MAX_RATIO} are supported")
    return (*values, *[used[0] if used else 0] * (n_all - len(values)))


def _indexer(r: ConfigReader, ratios: Iterable[int], n_rot: int) -> IndexerConfig:
    """The indexer's sizes; with every ratio 0 they are read, checked and not used."""
    ratio = max(ratios)
    budget = r.count("attention.indexer.top_k", high=2**24)
    head_dim = r.count("attention.indexer.key_length", high=8192)
    r.demand(
        n_rot <= head_dim,
        f"{r.key('attention.indexer.key_length')} is {head_dim}; {n_rot} dimensions of it are to turn",
    )
    r.demand(
        ratio == 0 or budget % ratio == 0,
        f"{r.key('attention.indexer.top_k')} is {budget}; expected a multiple of the ratio {ratio}",
    )
    n_head = r.count("attention.indexer.head_count", high=4096)
    return IndexerConfig(n_head=n_head, head_dim=head_dim, budget=budget, ratio=ratio or 1)


def _warn_of_dense_attention(config: Qwen4ExpConfig, file: GgufFile) -> None:
    """A known fault of converters leaves every ratio at 0; such a model runs, and gets worse with length."""
    has_indexer = any(f"blk.{i}.indexer.q_proj.weight" in file.tensors for i in config.attention_layers)
    if has_indexer and not config.sparse_layers:
        log.warning(
            "%s: the file has an indexer for sparse attention, but %s.attention.compress_ratios switches it "
            "off in every layer, as a faulty converter does; attention is dense, which the model was not "
            "trained for beyond %d tokens. Convert the checkpoint again, or set the key to its ratio.",
            file.path,
            config.architecture,
            config.indexer.budget,
        )


def _warn_of_coarse_mixers(file: GgufFile) -> None:
    """Published findings: with these below 8 bits the model stops following its instructions."""
    coarse = [
        t.name
        for t in file.tensors.values()
        if t.name.endswith(("_inject.weight", "_down.weight")) and ".hc_" in t.name and t.type not in PRECISE
    ]
    if coarse:
        log.warning(
            "%s: %d mixers of residual streams have fewer than 8 bits (%s is %s); such files answer badly",
            file.path,
            len(coarse),
            coarse[0],
            file.tensors[coarse[0]].type.label,
        )
