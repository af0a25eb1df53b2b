"""What a model is, read from GGUF metadata and checked for sense. Layer 2.

A config holds only numbers that bound the shapes of tensors or steer the maths; every range is
checked here so that no value from a file can reach an assertion of ggml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError
from pyggml_dflash.ggml.tensor_file import TensorFile

RopePairs = Literal["adjacent", "halves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: which dimensions turn, and how fast."""

    n_dims: int  # the first n_dims of each head
    pairs: RopePairs  # adjacent: (0, 1), (2, 3); halves: (0, n/2), (1, n/2 + 1)
    freq_base: float
    scaling: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0
    n_ctx_orig: int = 0
    ext_factor: float = 0.0  # YaRN: how much of the correction by frequency is mixed in
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Gated DeltaNet layers: head size, key and value heads, convolution taps."""

    head_dim: int
    n_key_head: int
    n_value_head: int
    n_taps: int

    @property
    def key_dim(self) -> int:
        """Width of all key heads."""
        return self.head_dim * self.n_key_head

    @property
    def value_dim(self) -> int:
        """Width of all value heads."""
        return self.head_dim * self.n_value_head

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts with one shared expert."""

    n_expert: int
    n_used: int
    ff_dim: int
    shared_ff_dim: int
    weight_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model; widths in elements, contexts in tokens."""

    architecture: str
    n_layer: int  # of the trunk; draft layers apart
    n_mtp: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int  # 0 where every layer has experts
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    attn_scale: float
    rope: RopeConfig
    recurrent: tuple[bool, ...]  # per trunk layer: delta net (True) or attention
    delta_net: DeltaNetConfig | None = None
    moe: MoeConfig | None = None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Trunk layers with keys and values."""
        return tuple(i for i, recurrent in enumerate(self.recurrent) if not recurrent)

    @property
    def hidden_width(self) -> int:
        """Width of the rows that an MTP block reads of the trunk."""
        return self.n_embd

    @property
    def kv_dim(self) -> int:
        """Width of one row of keys (or of values)."""
        return self.head_dim * self.n_head_kv


class ConfigReader:
    """Metadata of one architecture, read with range checks that name file and key."""

    def __init__(self, file: TensorFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def key(self, name: str) -> str:
        """The full key of `name`."""
        return f"{self.architecture}.{name}"

    def shown(self, name: str) -> str:
        """The key of `name` as the user finds it in the file."""
        return self.file.shown(self.key(name))

    def has(self, name: str) -> bool:
        """True if the file has the key."""
        return self.key(name) in self.file.metadata

    def count(self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**24) -> int:
        """A whole number within [low, high]."""
        key = self.key(name)
        value = self.file.get_int(key) if default is None else self.file.get_int(key, default)
        if not low <= value <= high:
            raise self.damaged(f"{self.file.shown(key)} is {value}; expected {low} to {high}")
        return value

    def number(
        self, name: str, default: float | None = None, *, low: float = 0.0, high: float = math.inf
    ) -> float:
        """A finite number within [low, high]."""
        key = self.key(name)
        value = self.file.get_float(key) if default is None else self.file.get_float(key, default)
        if not (math.isfinite(value) and low <= value <= high):
            raise self.damaged(f"{self.file.shown(key)} is {value}; expected {low:g} to {high:g}")
        return value

    def damaged(self, text: str) -> DamagedFileError:
        """An error about a value that contradicts itself."""
        return DamagedFileError(f"{self.file.path}: {text}")

    def unsupported(self, text: str) -> UnsupportedModelError:
        """An error about a value that is sound but not handled."""
        return UnsupportedModelError(f"{self.file.path}: {text}")

    def demand(self, holds: bool, text: str) -> None:
        """Raise `DamagedFileError` with `text` unless `holds`."""
        if not holds:
            raise self.damaged(text)

    def n_vocab(self) -> int:
        """Rows of the embedding table, the truth about the vocabulary."""
        table = self.file.tensors.get("token_embd.weight")
        if table is None:
            raise self.damaged("tensor 'token_embd.weight' is missing")
        self.demand(
            len(table.shape) == 2,
            f"tensor 'token_embd.weight' has shape {list(table.shape)}; expected two dimensions",
        )
        return table.shape[1]

    def heads(self) -> tuple[int, int, int]:
        """(heads, KV heads, head size) of the attention layers."""
        n_head = self.count("attention.head_count", high=4096)
        n_head_kv = self.count("attention.head_count_kv", n_head, high=4096)
        n_embd = self.count("embedding_length", high=2**20)
        head_dim = self.count("attention.key_length", max(1, n_embd // n_head), high=8192)
        value_dim = self.count("attention.value_length", head_dim, high=8192)
        self.demand(n_head % n_head_kv == 0, f"{n_head} heads cannot share {n_head_kv} KV heads evenly")
        if head_dim != value_dim:
            raise self.unsupported(f"key heads of {head_dim} and value heads of {value_dim} differ")
        return n_head, n_head_kv, head_dim

    def attn_scale(self, head_dim: int) -> float:
        """Factor on attention scores."""
        return self.number("attention.scale", 0.0) or 1.0 / math.sqrt(head_dim)

    def rope(self, head_dim: int, pairs: RopePairs) -> RopeConfig:
        """Rotary parameters, scaling included; an unknown scaling is refused."""
        n_dims = self.count("rope.dimension_count", head_dim, high=head_dim)
        self.demand(
            n_dims % 2 == 0, f"{self.key('rope.dimension_count')} is {n_dims}; expected an even number"
        )
        base = self.number("rope.freq_base", 10000.0, low=1.0)
        kind = self.file.get_str(self.key("rope.scaling.type"), "none")
        legacy = self.number("rope.scale_linear", 1.0, low=1e-6, high=1e6)
        if kind == "none" and legacy != 1.0:
            kind = "linear"
        if kind not in ("none", "linear", "yarn"):
            raise self.unsupported(f"{self.key('rope.scaling.type')} is {kind!r}; known: none, linear, yarn")
        if kind == "none":
            return RopeConfig(n_dims=n_dims, pairs=pairs, freq_base=base)
        trained = self.count("context_length", high=2**31 - 1)
        return RopeConfig(
            n_dims=n_dims,
            pairs=pairs,
            freq_base=base,
            scaling="linear" if kind == "linear" else "yarn",
            factor=self.number("rope.scaling.factor", legacy if legacy != 1.0 else None, low=1e-6, high=1e6),
            ext_factor=self.number("rope.scaling.yarn_ext_factor", 1.0, high=1e6) if kind == "yarn" else 0.0,
            n_ctx_orig=self.count("rope.scaling.original_context_length", trained, high=2**31 - 1),
            attn_factor=self.number("rope.scaling.attn_factor", 1.0, low=1e-6, high=1e6),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0, high=1e6),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0, high=1e6),
        )
