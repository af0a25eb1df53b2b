"""Writes files of a real model's shape whose weights are holes: no room on disk, and they read as zeros."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from tests.tiny import Tiny, is_quantisable, metadata, tensor_shapes

ALIGNMENT: Final = 32

# As the published model of 27 billion parameters; its vocabulary has more rows than tokens here.
SHAPE_27B: Final = Tiny(
    architecture="qwen35",
    n_embd=5120,
    n_layer=64,
    n_head=24,
    n_head_kv=4,
    head_dim=256,
    n_ff=17_408,
    n_vocab=248_320,
    n_ctx_train=262_144,
    rope_dims=64,
    interval=4,
    net_head_dim=128,
    n_key_head=16,
    n_value_head=48,
)


def write_sparse(path: Path, tiny: Tiny, element: ElementType = ElementType.Q4_K) -> int:
    """The model as a file with matrices of one type; returns the bytes of its weights."""
    writer = GgufWriter()
    for key, value in metadata(tiny).items():
        writer.set(key, value)
    writer.write(path)
    table, offset = [], 0
    for name, shape in tensor_shapes(tiny).items():
        type = element if is_quantisable(name, shape) else ElementType.F32
        rows = 1
        for n in shape[1:]:
            rows *= n
        encoded = name.encode()
        table += [
            struct.pack("<Q", len(encoded)) + encoded,
            struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type, offset),
        ]
        offset += -(-type.row_bytes(shape[0]) * rows // ALIGNMENT) * ALIGNMENT
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<Q", len(table) // 2))
        file.seek(0, 2)
        file.write(b"".join(table))
        data = -(-file.tell() // ALIGNMENT) * ALIGNMENT
        file.truncate(data + offset)
    return offset
