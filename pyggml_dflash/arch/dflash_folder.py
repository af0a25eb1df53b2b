"""A DFlash draft as z-lab publishes it, opened under the keys and names of a `dflash` GGUF file. Layer 4.

Beside the names three things differ: a GGUF file counts target layers by their inputs, which is one more
than the published ids; its vectors are in single precision; and its rotary pairs lie half a head apart,
while some folders have them side by side.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.arch.dflash_config import SELECTOR_MARKER
from pyggml_dflash.arch.dflash_folder_config import (
    CONFIG_NAMES,
    KINDS,
    draft_metadata,
    interleaved_pairs,
    value_types,
)
from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError
from pyggml_dflash.ggml.convert_rows import to_single
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_part import TensorInfo
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.checkpoint import Checkpoint, StoredTensor

MEMORY_ALIGNMENT: Final = 32  # bytes, as mapped weights have to have
MASK_EMBEDDING: Final = "mask_embedding.pt"

OUTER_TENSORS: Final = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
}
LAYER_TENSORS: Final = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
PROJECTIONS: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VECTORS: Final = ("_norm.weight", ".bias", "_conv_base")  # ends of the names of what is in single precision
ROTATED: Final = tuple(f"attn_{x}{end}" for x in "qk" for end in (".weight", ".bias", "_norm.weight"))


def open_draft_folder(path: Path) -> TensorFile:
    """The draft in a published folder; vectors are copied, everything else stays mapped.

    ModelFileError, or a kind of it, names the file, value or tensor that is missing or wrong.
    """
    checkpoint = Checkpoint.open(path)
    if (path / MASK_EMBEDDING).exists():
        raise UnsupportedModelError(
            f"{path} has {MASK_EMBEDDING}: drafts with a mask embedding of their own are not supported"
        )
    config = checkpoint.config.nested("dflash_config")
    metadata = draft_metadata(config)
    names = published_names(config.integer("num_hidden_layers"))
    table = _Table(checkpoint, interleaved_pairs(config))
    ignored = {"rotary_emb.inv_freq"} | ({"embed_tokens.weight"} if _has_spare_table(checkpoint) else set())
    for stored in checkpoint.tensors.values():
        plain = stored.name.removeprefix("model.")
        if plain not in ignored:
            plain = plain.removesuffix(".weight") if plain.endswith("_codebook.weight") else plain
            table.add(names.get(plain, stored.name), stored)
    kinds = config.texts("architectures", [KINDS[0]])
    if kinds[0] == KINDS[1] and SELECTOR_MARKER not in table.names:
        raise DamagedFileError(f"{path}: 'architectures' is {KINDS[1]}, but there is no candidate_selector")
    ours = {name: theirs for theirs, name in names.items()}
    return TensorFile(
        path,
        metadata,
        value_types(metadata),
        table.tensors,
        checkpoint.maps,
        memory=table.copies(),
        names=CONFIG_NAMES | ours | table.names,
    )


def _has_spare_table(checkpoint: Checkpoint) -> bool:
    """True where an embedding table is among the weights only because a tool put it there."""
    return not checkpoint.config.flag("has_embed_tokens", True)


def published_names(n_layer: int) -> dict[str, str]:
    """Published names, without the 'model.' that some have in front, and those of a GGUF file."""
    layer = LAYER_TENSORS | {
        f"{theirs}.{end}": f"{ours}.{end}"
        for theirs, ours in PROJECTIONS.items()
        for end in ("weight", "bias")
    }
    layers = (
        (f"layers.{i}.{theirs}", f"blk.{i}.{ours}") for i in range(n_layer) for theirs, ours in layer.items()
    )
    return OUTER_TENSORS | dict(layers)


@dataclass(frozen=True, slots=True)
class _Copy:
    name: str
    shape: tuple[int, ...]  # ggml order
    element: ElementType
    data: NDArray[np.uint8]


class _Table:
    """The tensor table under GGUF's names, while it is made."""

    def __init__(self, checkpoint: Checkpoint, pairs: tuple[int, int] | None) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.names: dict[str, str] = {}  # what the folder calls them
        self._checkpoint, self._pairs = checkpoint, pairs
        self._copies: list[_Copy] = []

    def add(self, name: str, stored: StoredTensor) -> None:
        """Enter a tensor as it lies in its file, or a copy of it as GGUF files have it."""
        if name in self.names:
            both = f"tensors {self.names[name]!r} and {stored.name!r}"
            raise DamagedFileError(f"{self._checkpoint.path}: {both} are the same part of the draft")
        self.names[name], shape = stored.name, stored.shape[::-1]
        turned, widened = self._pairs is not None and name.endswith(ROTATED), name.endswith(VECTORS)
        if not turned and not widened:
            info = TensorInfo(name, shape, stored.element, stored.part, stored.offset, stored.n_bytes)
            self.tensors[name] = info
            return
        data, element = np.frombuffer(self._checkpoint.data(stored), np.uint8), stored.element
        if turned:
            data = self._turned(stored, data)
        if widened:
            data, element = to_single(data, element).view(np.uint8), ElementType.F32
        self._copies.append(_Copy(name, shape, element, data))

    def _turned(self, stored: StoredTensor, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Rows with the first of every rotary pair of a head in front of all second ones."""
        assert self._pairs is not None
        head_dim, n_rot = self._pairs
        n_rows = stored.shape[0]
        if n_rows % head_dim or n_rot % 2 or not 0 < n_rot <= head_dim:
            raise DamagedFileError(
                f"{self._checkpoint.path}: tensor {stored.name!r} has {n_rows} rows, no whole "
                f"number of heads of {head_dim} with {n_rot} dimensions in pairs"
            )
        heads = data.reshape(-1, head_dim, stored.n_bytes // n_rows)
        parts = [heads[:, 0:n_rot:2], heads[:, 1:n_rot:2], heads[:, n_rot:]]
        return np.concatenate(parts, axis=1).reshape(-1)

    def copies(self) -> mmap.mmap | None:
        """Memory that holds the copies, which enter the table as a part behind the files."""
        sizes = [-(-c.data.nbytes // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT for c in self._copies]
        if not sizes:
            return None
        memory, part, offset = mmap.mmap(-1, sum(sizes)), len(self._checkpoint.maps), 0
        for c, size in zip(self._copies, sizes, strict=True):
            memory[offset : offset + c.data.nbytes] = c.data.tobytes()
            self.tensors[c.name] = TensorInfo(c.name, c.shape, c.element, part, offset, c.data.nbytes)
            offset += size
        return memory
