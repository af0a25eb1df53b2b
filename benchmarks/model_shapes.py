"""Shapes of real models and drafts, by name, for files of random weights.

As published: `qwen3-4b`, `qwen35-27b`, `qwen35moe-35b-a3b`, `qwen4exp` and the drafts. `qwen35-4b` is assumed
where nothing was published in the files at hand: 32 layers of width 2560, 16 heads and 4 key/value heads of
256, feed-forward 9216, 16 key and 32 value heads of 128 in the delta nets, head tied to the embedding.
`llama-step` is one tiny layer. `tiny` shrinks any of them to what a CPU runs in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NextParts:
    """What `qwen4exp` has beyond the Qwen3.5 family, named as in its keys."""

    n_stream: int = 4
    low_rank: int = 320
    n_index_head: int = 4
    index_dim: int = 128
    budget: int = 2048  # tokens that sparse attention keeps
    ratio: int = 4  # tokens per block
    ple_layer: int = 1
    ple_row: int = 160
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_base: int = 20_000_000  # rows of a hash head, about
    ple_taps: int = 4

    @property
    def n_hash_head(self) -> int:
        """Rows of the n-gram table that a token reads."""
        return (self.ngram_size - 1) * self.heads_per_ngram


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model, named as in GGUF."""

    architecture: Literal["qwen3", "qwen35", "qwen35moe", "qwen4exp", "llama"]
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    tied: bool
    n_ctx: int = 262_144
    n_rot: int = 64
    rope_base: float = 1e7
    state: int = 128  # delta net: head size, key heads, value heads
    n_key_head: int = 16
    n_value_head: int = 32
    n_expert: int = 0
    n_expert_used: int = 0
    expert_ff: int = 0
    n_mtp: int = 0
    next: NextParts | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether three of four layers are delta nets, and attention is gated."""
        return self.architecture not in ("llama", "qwen3")

    @property
    def rope_sections(self) -> tuple[int, int, int, int]:
        """Pairs of a head that each of three axes turns; half the rotary dimensions in all."""
        third, rest = divmod(self.n_rot // 2, 3)
        return third + (rest > 0), third + (rest > 1), third, 0

    @property
    def value_dim(self) -> int:
        """Width of a delta net's values."""
        return self.state * self.n_value_head

    @property
    def conv_dim(self) -> int:
        """Channels of a delta net's convolution: queries, keys and values."""
        return 2 * self.state * self.n_key_head + self.value_dim

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer is a delta net: every one of the trunk but each fourth."""
        return self.is_hybrid and layer < self.n_layer and (layer + 1) % 4 != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Sizes of a DFlash draft; the vocabulary and, where its width differs, a scale come from the target."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int = 128
    n_ff: int
    block_size: int
    target_layers: tuple[int, ...]  # whose inputs it reads, as the file counts them
    mask_token: int = 248_070
    window: int = 2048  # of sliding layers
    sliding: tuple[bool, ...]
    causal: bool | None = None  # None: the file does not say
    conv_taps: int = 0  # version 2: convolutions and candidate selector
    conv_group: int = 16
    selector_rank: int = 256
    n_candidates: int = 16

    @property
    def version(self) -> int:
        """1, or 2 with convolutions and candidate selector."""
        return 2 if self.conv_taps else 1

    def for_target(self, n_layer: int, n_embd: int, n_vocab: int) -> DraftShape:
        """The draft beside a target of other sizes: widths in proportion, layers spread as published."""
        if n_embd == self.n_embd and max(self.target_layers) < n_layer and self.mask_token < n_vocab:
            return self
        wide = n_embd / self.n_embd
        return replace(
            self,
            n_embd=n_embd,
            n_head=max(2, 2 * round(self.n_head * wide / 2)),
            n_head_kv=max(1, round(self.n_head_kv * wide)),
            n_ff=max(256, round(self.n_ff * wide / 256) * 256),
            target_layers=spread_layers(n_layer, len(self.target_layers)),
            mask_token=min(self.mask_token, n_vocab - 1),
        )


def spread_layers(n_layer: int, n: int) -> tuple[int, ...]:
    """Which layer inputs a draft reads of a target of `n_layer` layers: up to `n`, spread as published."""
    n = max(1, min(n, n_layer - 1))
    if n_layer < n + 3:
        return tuple(range(1, n + 1))
    return tuple(2 + round(i * (n_layer - 4) / max(1, n - 1)) for i in range(n))


PRESETS: Final = {
    "qwen3-4b": Shape(
        architecture="qwen3", n_layer=36, n_embd=2560, n_head=32, n_head_kv=8, head_dim=128, n_ff=9728,
        n_vocab=151_936, tied=True, n_ctx=40_960, n_rot=128, rope_base=1e6,
    ),
    "qwen35-4b": Shape(
        architecture="qwen35", n_layer=32, n_embd=2560, n_head=16, n_head_kv=4, head_dim=256, n_ff=9216,
        n_vocab=248_320, tied=True,
    ),
    "qwen35-27b": Shape(
        architecture="qwen35", n_layer=64, n_embd=5120, n_head=24, n_head_kv=4, head_dim=256, n_ff=17_408,
        n_vocab=248_320, tied=False, n_value_head=48,
    ),
    "qwen35moe-35b-a3b": Shape(
        architecture="qwen35moe", n_layer=40, n_embd=2048, n_head=16, n_head_kv=2, head_dim=256, n_ff=0,
        n_vocab=248_320, tied=False, n_expert=256, n_expert_used=8, expert_ff=512,
    ),
    "qwen4exp": Shape(
        architecture="qwen4exp", n_layer=48, n_embd=2560, n_head=24, n_head_kv=2, head_dim=256, n_ff=0,
        n_vocab=248_320, tied=False, n_value_head=48, n_expert=512, n_expert_used=10, expert_ff=640,
        next=NextParts(),
    ),
    "llama-step": Shape(
        architecture="llama", n_layer=1, n_embd=64, n_head=2, n_head_kv=1, head_dim=32, n_ff=64,
        n_vocab=512, tied=True, n_ctx=4096, n_rot=32,
    ),
}  # fmt: skip

DRAFTS: Final = {
    "dflash2-27b": DraftShape(
        n_layer=5, n_embd=5120, n_head=32, n_head_kv=8, n_ff=17_408, block_size=8,
        target_layers=(6, 20, 34, 48, 62), sliding=(True,) * 5, causal=False, conv_taps=2,
    ),
    "dflash-27b": DraftShape(
        n_layer=5, n_embd=5120, n_head=32, n_head_kv=8, n_ff=17_408, block_size=16,
        target_layers=(2, 17, 32, 47, 62), sliding=(True,) * 4 + (False,),
    ),
    "dflash-35b-a3b": DraftShape(
        n_layer=8, n_embd=2048, n_head=32, n_head_kv=4, n_ff=6144, block_size=16,
        target_layers=(2, 11, 20, 29, 38), window=4096, sliding=(True,) * 8,
    ),
}  # fmt: skip


def tiny(shape: Shape) -> Shape:
    """The same architecture at sizes for a test; rows stay long enough for every block format."""
    small_next = NextParts(
        low_rank=32, index_dim=64, budget=64, ratio=8, ple_row=32, heads_per_ngram=4, ngram_base=1000
    )
    return replace(
        shape,
        n_layer=8 if shape.is_hybrid else 4,
        n_embd=256,
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        n_ff=512 if shape.n_ff else 0,
        n_vocab=1024,
        n_ctx=4096,
        n_rot=16 if shape.is_hybrid else 64,
        state=32,
        n_key_head=4,
        n_value_head=8,
        n_expert=8 if shape.n_expert else 0,
        n_expert_used=2 if shape.n_expert else 0,
        expert_ff=0 if not shape.n_expert else 160 if shape.next else 256,
        next=small_next if shape.next else None,
    )
