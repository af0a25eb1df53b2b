"""Random tensors, keys and vocabulary of a model, collected into a GGUF file.

Weights have a standard deviation of 1/sqrt(inputs) and norms are near one, so numbers stay finite through
any depth. The mix of types is that of real files: the _M mixes keep sensitive matrices finer, and rows that
are no whole number of a K-quant's blocks get the type that llama.cpp falls back to. The vocabulary has the
256 bytes, a merge, control tokens, and fillers up to its size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from random_blocks import BlockPool

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_writer import GgufWriter

# 'mixer': small matrices around the layers that real files keep in Q8_0; 'table': rows that are looked up.
Kind = Literal["matrix", "attn_v", "ffn_down", "head", "embedding", "mixer", "table"]
TypeOf = Callable[[Kind, int], ElementType]  # of a matrix in a layer

TYPES: Final = ("Q4_K_M", "Q5_K_M", "Q4_K", "Q6_K", "Q8_0", "Q4_0", "F16", "BF16", "F32")
FALLBACKS: Final = {
    ElementType.Q4_K: ElementType.Q5_0,
    ElementType.Q5_K: ElementType.Q5_1,
    ElementType.Q6_K: ElementType.Q8_0,
}
CHAT_TEMPLATE: Final = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
END_OF_TEXT: Final = "<|endoftext|>"
CONTROL_TOKENS: Final = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
NORMAL, CONTROL, UNUSED = 1, 3, 5
N_UNUSED: Final = 200  # rows at the end without a token, as real files have


def more_bits(layer: int, n_layer: int) -> bool:
    """Layers whose sensitive matrices the _M mixes keep finer: the outer eighths, and each third between."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def mix(name: str, n_layer: int, *, tied: bool = False) -> TypeOf:
    """Which type a matrix gets in a file of type `name`."""
    base = ElementType[name.removesuffix("_M")]
    is_mix = name != base.name

    def choose(kind: Kind, layer: int) -> ElementType:
        if kind in ("mixer", "table") and base.block == 256:
            return ElementType.Q8_0
        fine = kind in ("attn_v", "ffn_down") and more_bits(layer, n_layer)
        is_head = kind == "head" or (kind == "embedding" and tied)
        return ElementType.Q6_K if is_mix and (fine or is_head) else base

    return choose


class TensorWriter:
    """Adds random tensors to a `GgufWriter`; the same seed and the same calls give the same bytes."""

    def __init__(self, type_of: TypeOf, seed: int) -> None:
        self._type_of = type_of
        self._pool = BlockPool(seed)
        self.rng = np.random.default_rng(seed)
        self.file = GgufWriter()
        self.n_params = 0

    def matrix(self, name: str, shape: tuple[int, ...], kind: Kind, layer: int, out_std: float = 1.0) -> None:
        """A matrix whose products with unit-variance rows have the standard deviation `out_std`."""
        element = self._type_of(kind, layer)
        if shape[0] % element.block:
            element = FALLBACKS[element]
        n = prod(shape)
        self.n_params += n
        std = float(out_std * shape[0] ** -0.5)
        self.file.add_raw(name, self._pool.tensor(element, n, std), shape=shape, element=element)

    def vector(self, name: str, n: int) -> None:
        """A norm's weights."""
        self.numbers(name, 1 + self.rng.normal(0, 0.1, n))

    def numbers(self, name: str, values: npt.NDArray[Any]) -> None:
        """An array as F32."""
        self.n_params += values.size
        self.file.add_tensor(name, values.astype(np.float32))

    def vocabulary(self, n_vocab: int, pre: str) -> None:
        """Tokens, their kinds, a merge, special ids and a chat template."""
        put, known = self.file.set, known_tokens()
        n_normal = len(known) - len(CONTROL_TOKENS)
        filler = [f"filler{i}" for i in range(n_vocab - len(known) - N_UNUSED)]
        types = [NORMAL] * n_normal + [CONTROL] * len(CONTROL_TOKENS) + [NORMAL] * len(filler)
        put("tokenizer.ggml.model", "gpt2")
        put("tokenizer.ggml.pre", pre)
        put("tokenizer.ggml.tokens", [*known, *filler, *(f"[PAD{i}]" for i in range(N_UNUSED))])
        put("tokenizer.ggml.token_type", types + [UNUSED] * N_UNUSED)
        put("tokenizer.ggml.merges", ["Ġ t"])
        put("tokenizer.ggml.eos_token_id", known.index("<|im_end|>"))
        put("tokenizer.ggml.add_bos_token", False)
        put("tokenizer.chat_template", CHAT_TEMPLATE)


def known_tokens() -> list[str]:
    """The tokens with a meaning, in the order of their ids: bytes, a merge's result, control tokens."""
    return [*byte_characters(), "Ġt", *CONTROL_TOKENS]


def byte_characters() -> Iterator[str]:
    """The 256 characters by which byte-level BPE spells bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    for byte in range(256):
        yield chr(byte if byte in printable else next(spare))
