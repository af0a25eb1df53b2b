"""What a random `qwen4exp` model has beyond the Qwen3.5 family: mixers, indexer, n-gram table, MTP extras."""

from __future__ import annotations

from itertools import accumulate, count, islice
from math import isqrt
from typing import Final

from model_shapes import NextParts, Shape
from random_tensors import CONTROL_TOKENS, END_OF_TEXT, TensorWriter, known_tokens

from pyggml_dflash.ggml.gguf_values import ValueType

GAMMA: Final = 0x9E3779B97F4A7C15
WORD: Final = 2**64
HASH_SEED: Final = 1234
TABLE_ROWS: Final = 128  # rows of the n-gram table are a whole number of these
INJECT_STD: Final = 0.5  # a stream takes 0.8 to 1.2 of a sub-layer's output


class NextLayers:
    """Adds those parts of one model to a `TensorWriter`."""

    def __init__(self, shape: Shape, parts: NextParts, out: TensorWriter) -> None:
        self._shape, self._parts, self._out = shape, parts, out

    @property
    def _wide(self) -> int:
        return self._parts.n_stream * self._shape.n_embd

    def add_keys(self) -> None:
        """Every key with a value of its own."""
        s, p, put = self._shape, self._parts, self._out.file.set
        n_all = s.n_layer + s.n_mtp
        recurrent = [s.is_recurrent(i) for i in range(n_all)]
        sizes, multipliers = head_sizes(p), hash_multipliers(p.ngram_size, s.n_vocab)
        lists: dict[str, tuple[list[int] | list[bool], ValueType]] = {
            "attention.recurrent_layers": (recurrent, ValueType.BOOL),
            "attention.compress_ratios": ([0 if r else p.ratio for r in recurrent], ValueType.U32),
            "ple.layers": ([p.ple_layer], ValueType.U32),
            "ple.layer_multipliers": (multipliers, ValueType.U64),
            "ple.head_vocab_sizes": (sizes, ValueType.U64),
            "ple.head_offsets": (list(accumulate(sizes[:-1], initial=0)), ValueType.U64),
        }
        end = known_tokens().index(END_OF_TEXT)
        numbers = {
            "hyper_connection.count": p.n_stream,
            "hyper_connection.low_rank": p.low_rank,
            "attention.indexer.head_count": p.n_index_head,
            "attention.indexer.key_length": p.index_dim,
            "attention.indexer.top_k": p.budget,
            "ple.ngram_size": p.ngram_size,
            "ple.heads_per_ngram": p.heads_per_ngram,
            "ple.conv_kernel": p.ple_taps,
            "ple.eos_token_id": end,
            "ple.image_token_id": end + len(CONTROL_TOKENS),  # a filler
            "embedding_length_per_layer_input": p.ple_row,
        }
        for key, (values, kind) in lists.items():
            put(f"{s.architecture}.{key}", values, kind)
        for key, value in numbers.items():
            put(f"{s.architecture}.{key}", value)

    def add_outer(self) -> None:
        """The last mixer and the n-gram table."""
        self._mixer("output_hc", self._shape.n_layer - 1, inject=False)
        p = self._parts
        n_rows = -(-sum(head_sizes(p)) // TABLE_ROWS) * TABLE_ROWS
        shape = (p.ple_row, n_rows)
        self._out.matrix("per_layer_token_embd.weight", shape, "table", 0, out_std=p.ple_row**0.5)

    def add_to_layer(self, layer: int) -> None:
        """Mixers, and what the kind of layer asks for."""
        s, p, out, name = self._shape, self._parts, self._out, f"blk.{layer}."
        self._mixer(f"{name}hc_attn", layer)
        self._mixer(f"{name}hc_ffn", layer)
        if not s.is_recurrent(layer):
            width = p.n_index_head * p.index_dim
            out.matrix(f"{name}indexer.q_proj.weight", (s.n_embd, width), "mixer", layer)
            out.matrix(f"{name}indexer.k_proj.weight", (s.n_embd, p.index_dim), "mixer", layer)
            out.vector(f"{name}indexer.q_norm.weight", p.index_dim)
            out.vector(f"{name}indexer.k_norm.weight", p.index_dim)
        if layer == p.ple_layer:
            n_in = p.n_hash_head * p.ple_row
            out.matrix(f"{name}ple_key.weight", (n_in, self._wide), "matrix", layer)
            out.matrix(f"{name}ple_value.weight", (n_in, s.n_embd), "matrix", layer)
            for norm in ("key", "query", "conv"):
                out.vector(f"{name}ple_norm_{norm}.weight", self._wide)
            taps = out.rng.normal(0, p.ple_taps**-0.5, (self._wide, p.ple_taps))
            out.numbers(f"{name}ple_conv1d.weight", taps)

    def add_to_mtp(self, layer: int) -> None:
        """The block's norm over all streams and its own last mixer."""
        self._out.vector(f"blk.{layer}.nextn.hnorm.weight", self._wide)
        self._mixer(f"blk.{layer}.nextn.hc_head", layer, inject=False)

    def _mixer(self, name: str, layer: int, *, inject: bool = True) -> None:
        out, wide, rank = self._out, self._wide, self._parts.low_rank
        out.vector(f"{name}_norm.weight", wide)
        out.matrix(f"{name}_down.weight", (wide, rank), "mixer", layer)
        out.matrix(f"{name}_up.weight", (rank, wide), "mixer", layer)
        if inject:
            rows = out.rng.normal(0, INJECT_STD * wide**-0.5, (self._parts.n_stream, wide))
            out.numbers(f"{name}_inject.weight", rows)


def head_sizes(parts: NextParts) -> list[int]:
    """Rows of each hash head: the primes from `ngram_base` on."""
    primes = (n for n in count(parts.ngram_base) if is_prime(n))
    return list(islice(primes, parts.n_hash_head))


def is_prime(n: int) -> bool:
    """Whether `n`, of a few million, is prime."""
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))


def hash_multipliers(ngram_size: int, n_vocab: int) -> list[int]:
    """The odd factor of each token of an n-gram, as the model's code derives them from its seed."""
    half = max(1, (2**63 - 1) // n_vocab // 2)
    return [2 * (_splitmix64(HASH_SEED + GAMMA * (j + 1)) % half) + 1 for j in range(ngram_size)]


def _splitmix64(v: int) -> int:
    v = (v + GAMMA) % WORD
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    v = (v ^ (v >> 27)) * 0x94D049BB133111EB % WORD
    return v ^ (v >> 31)
