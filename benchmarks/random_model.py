"""Writes a GGUF file of a real model's shape with random weights, to measure speed where no model is.

    python benchmarks/random_model.py qwen35-4b --type Q4_K_M out.gguf

Names, keys and the mix of types are those of real files, so other programs load it too. Weights have a
standard deviation of 1/sqrt(inputs), norms are near one and decays moderate, so numbers stay finite through
any depth; the text is noise. The vocabulary has the 256 bytes, a merge, control tokens, and fillers up to
its size. Bytes come from a pool (`random_blocks`), so the disk sets the pace: 2.6 GB take seconds.

Shapes: `qwen35-27b` and `qwen35moe-35b-a3b` as published. `qwen35-4b` is assumed where nothing was published
in the files at hand: 32 layers of width 2560, 16 heads and 4 key/value heads of 256, feed-forward 9216, 16
key and 32 value heads of 128 in the delta nets, head tied to the embedding. `llama-step` is one tiny layer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from random_blocks import BlockPool

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_writer import GgufWriter

Kind = Literal["matrix", "attn_v", "ffn_down", "head", "embedding"]
TypeOf = Callable[[Kind, int], ElementType]  # of a matrix in a layer

CHAT_TEMPLATE: Final = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CONTROL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NORMAL, CONTROL, UNUSED = 1, 3, 5
N_UNUSED: Final = 200  # rows at the end without a token, as real files have
LOGIT_STD: Final = 4.0  # of the head's output, as trained models have about
TIED_STD: Final = 2.0  # a tied head favours the token it just read; less, so that text does not stand still


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model, named as in GGUF."""

    architecture: Literal["qwen35", "qwen35moe", "llama"]
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
    state: int = 128  # delta net: head size, key heads, value heads
    n_key_head: int = 16
    n_value_head: int = 32
    n_expert: int = 0
    n_expert_used: int = 0
    expert_ff: int = 0

    @property
    def value_dim(self) -> int:
        """Width of a delta net's values."""
        return self.state * self.n_value_head

    @property
    def conv_dim(self) -> int:
        """Channels of a delta net's convolution: queries, keys and values."""
        return 2 * self.state * self.n_key_head + self.value_dim

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer is a delta net: every one but each fourth."""
        return self.architecture != "llama" and (layer + 1) % 4 != 0


PRESETS: Final = {
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
    "llama-step": Shape(
        architecture="llama", n_layer=1, n_embd=64, n_head=2, n_head_kv=1, head_dim=32, n_ff=64,
        n_vocab=512, tied=True, n_ctx=4096, n_rot=32,
    ),
}  # fmt: skip


def more_bits(layer: int, n_layer: int) -> bool:
    """Layers whose sensitive matrices the _M mixes keep finer: the outer eighths, and each third between."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def mix(name: str, shape: Shape) -> TypeOf:
    """Which type a matrix gets in a file of type `name`."""

    def medium(base: ElementType) -> TypeOf:
        def choose(kind: Kind, layer: int) -> ElementType:
            fine = kind in ("attn_v", "ffn_down") and more_bits(layer, shape.n_layer)
            is_head = kind == "head" or (kind == "embedding" and shape.tied)
            return ElementType.Q6_K if fine or is_head else base

        return choose

    if name in ("Q4_K_M", "Q5_K_M"):
        return medium(ElementType[name.removesuffix("_M")])
    return lambda kind, layer: ElementType[name]


TYPES: Final = ("Q4_K_M", "Q5_K_M", "Q4_K", "Q6_K", "Q8_0", "Q4_0", "F16", "BF16", "F32")


class ModelWriter:
    """Adds the tensors and keys of one random model to a `GgufWriter`."""

    def __init__(self, shape: Shape, type_of: TypeOf, seed: int) -> None:
        self._shape, self._type_of = shape, type_of
        self._pool = BlockPool(seed)
        self._rng = np.random.default_rng(seed)
        self.writer = GgufWriter()
        self.n_params = 0

    def add_all(self) -> None:
        """Keys, vocabulary, and every tensor."""
        s = self._shape
        self._add_keys()
        self._add_vocabulary()
        self._matrix(
            "token_embd.weight", (s.n_embd, s.n_vocab), "embedding", 0, TIED_STD if s.tied else LOGIT_STD
        )
        for layer in range(s.n_layer):
            self._add_layer(layer)
        self._vector("output_norm.weight", s.n_embd)
        if not s.tied:
            self._matrix("output.weight", (s.n_embd, s.n_vocab), "head", 0, LOGIT_STD)

    def _add_keys(self) -> None:
        s, put = self._shape, self.writer.set
        put("general.architecture", s.architecture)
        put("general.name", f"random {s.architecture}")
        put("general.quantization_version", 2)
        keys: dict[str, object] = {
            "block_count": s.n_layer,
            "context_length": s.n_ctx,
            "embedding_length": s.n_embd,
            "attention.head_count": s.n_head,
            "attention.head_count_kv": s.n_head_kv,
            "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": s.n_rot,
            "rope.freq_base": 1e7,
        }
        if s.n_ff:
            keys["feed_forward_length"] = s.n_ff
        if s.architecture != "llama":
            keys |= {
                "rope.dimension_sections": [11, 11, 10, 0],
                "full_attention_interval": 4,
                "ssm.conv_kernel": 4,
                "ssm.state_size": s.state,
                "ssm.group_count": s.n_key_head,
                "ssm.time_step_rank": s.n_value_head,
                "ssm.inner_size": s.value_dim,
            }
        if s.n_expert:
            keys |= {
                "expert_count": s.n_expert,
                "expert_used_count": s.n_expert_used,
                "expert_feed_forward_length": s.expert_ff,
                "expert_shared_feed_forward_length": s.expert_ff,
            }
        for key, value in keys.items():
            put(f"{s.architecture}.{key}", value)

    def _add_vocabulary(self) -> None:
        put, n_vocab = self.writer.set, self._shape.n_vocab
        normal = [*byte_characters(), "Ġt"]  # a merge and its result, since readers want at least one
        known = [*normal, *CONTROL_TOKENS]
        filler = [f"filler{i}" for i in range(n_vocab - len(known) - N_UNUSED)]
        types = [NORMAL] * len(normal) + [CONTROL] * len(CONTROL_TOKENS) + [NORMAL] * len(filler)
        put("tokenizer.ggml.model", "gpt2")
        put("tokenizer.ggml.pre", "qwen2" if self._shape.architecture == "llama" else "qwen35")
        put("tokenizer.ggml.tokens", [*known, *filler, *(f"[PAD{i}]" for i in range(N_UNUSED))])
        put("tokenizer.ggml.token_type", types + [UNUSED] * N_UNUSED)
        put("tokenizer.ggml.merges", ["Ġ t"])
        put("tokenizer.ggml.eos_token_id", known.index("<|im_end|>"))
        put("tokenizer.ggml.add_bos_token", False)
        put("tokenizer.chat_template", CHAT_TEMPLATE)

    def _add_layer(self, layer: int) -> None:
        s, p = self._shape, f"blk.{layer}."
        self._vector(f"{p}attn_norm.weight", s.n_embd)
        if s.is_recurrent(layer):
            self._add_delta_net(layer)
        else:
            self._add_attention(layer)
        second = "ffn_norm" if s.architecture == "llama" else "post_attention_norm"
        self._vector(f"{p}{second}.weight", s.n_embd)
        if s.n_expert:
            self._add_experts(layer)
            return
        self._matrix(f"{p}ffn_gate.weight", (s.n_embd, s.n_ff), "matrix", layer)
        self._matrix(f"{p}ffn_up.weight", (s.n_embd, s.n_ff), "matrix", layer)
        self._matrix(f"{p}ffn_down.weight", (s.n_ff, s.n_embd), "ffn_down", layer)

    def _add_attention(self, layer: int) -> None:
        s, p = self._shape, f"blk.{layer}."
        gated = 1 if s.architecture == "llama" else 2  # queries, and behind each head's its gate
        self._matrix(f"{p}attn_q.weight", (s.n_embd, gated * s.head_dim * s.n_head), "matrix", layer)
        self._matrix(f"{p}attn_k.weight", (s.n_embd, s.head_dim * s.n_head_kv), "matrix", layer)
        self._matrix(f"{p}attn_v.weight", (s.n_embd, s.head_dim * s.n_head_kv), "attn_v", layer)
        self._matrix(f"{p}attn_output.weight", (s.head_dim * s.n_head, s.n_embd), "matrix", layer)
        if gated == 2:
            self._vector(f"{p}attn_q_norm.weight", s.head_dim)
            self._vector(f"{p}attn_k_norm.weight", s.head_dim)

    def _add_delta_net(self, layer: int) -> None:
        s, p, rng = self._shape, f"blk.{layer}.", self._rng
        self._matrix(f"{p}attn_qkv.weight", (s.n_embd, s.conv_dim), "attn_v", layer)
        self._matrix(f"{p}attn_gate.weight", (s.n_embd, s.value_dim), "matrix", layer)
        self._matrix(f"{p}ssm_alpha.weight", (s.n_embd, s.n_value_head), "matrix", layer)
        self._matrix(f"{p}ssm_beta.weight", (s.n_embd, s.n_value_head), "matrix", layer)
        self._matrix(f"{p}ssm_out.weight", (s.value_dim, s.n_embd), "matrix", layer)
        self._vector(f"{p}ssm_norm.weight", s.state)
        self._numbers(f"{p}ssm_conv1d.weight", rng.normal(0, 0.5, (s.conv_dim, 4)))
        self._numbers(f"{p}ssm_dt.bias", rng.uniform(-4, -1, s.n_value_head))
        self._numbers(f"{p}ssm_a", -rng.uniform(0.2, 2, s.n_value_head))

    def _add_experts(self, layer: int) -> None:
        s, p = self._shape, f"blk.{layer}."
        router = self._rng.normal(0, s.n_embd**-0.5, (s.n_expert, s.n_embd))
        self._numbers(f"{p}ffn_gate_inp.weight", router)
        self._numbers(f"{p}ffn_gate_inp_shexp.weight", self._rng.normal(0, s.n_embd**-0.5, s.n_embd))
        for end, shape in (("exps", (s.n_expert,)), ("shexp", ())):
            self._matrix(f"{p}ffn_gate_{end}.weight", (s.n_embd, s.expert_ff, *shape), "matrix", layer)
            self._matrix(f"{p}ffn_up_{end}.weight", (s.n_embd, s.expert_ff, *shape), "matrix", layer)
            self._matrix(f"{p}ffn_down_{end}.weight", (s.expert_ff, s.n_embd, *shape), "ffn_down", layer)

    def _matrix(
        self, name: str, shape: tuple[int, ...], kind: Kind, layer: int, out_std: float = 1.0
    ) -> None:
        """A matrix whose products with unit-variance rows have the standard deviation `out_std`."""
        element = self._type_of(kind, layer)
        n = int(np.prod(shape))
        self.n_params += n
        std = float(out_std * shape[0] ** -0.5)
        self.writer.add_raw(name, self._pool.tensor(element, n, std), shape=shape, element=element)

    def _vector(self, name: str, n: int) -> None:
        self._numbers(name, 1 + self._rng.normal(0, 0.1, n))

    def _numbers(self, name: str, values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
        self.n_params += values.size
        self.writer.add_tensor(name, values.astype(np.float32))


def byte_characters() -> Iterator[str]:
    """The 256 characters by which byte-level BPE spells bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    for byte in range(256):
        yield chr(byte if byte in printable else next(spare))


def write_model(path: Path, shape: Shape, type_name: str, *, seed: int = 1) -> int:
    """Write a random model; returns its number of parameters."""
    model = ModelWriter(shape, mix(type_name, shape), seed)
    model.add_all()
    model.writer.write(path)
    return model.n_params


@click.command()
@click.argument("preset", type=click.Choice(list(PRESETS)))
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--type", "type_name", type=click.Choice(TYPES), default="Q4_K_M", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Layers, instead of the preset's.")
@click.option("--vocab", type=click.IntRange(512), help="Rows of the vocabulary, instead of the preset's.")
@click.option("--seed", default=1, show_default=True)
def main(preset: str, path: Path, type_name: str, layers: int | None, vocab: int | None, seed: int) -> None:
    """Write a random model of the shape PRESET to PATH."""
    shape = PRESETS[preset]
    shape = replace(shape, n_layer=layers or shape.n_layer, n_vocab=vocab or shape.n_vocab)
    started = time.perf_counter()
    n_params = write_model(path, shape, type_name, seed=seed)
    seconds = time.perf_counter() - started
    print(f"{path}: {n_params / 1e9:.2f} G parameters, {path.stat().st_size / 1e9:.2f} GB, {seconds:.1f} s")


if __name__ == "__main__":
    main()
