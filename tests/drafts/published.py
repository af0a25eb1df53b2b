"""Writes drafts as they are published: a folder with config.json and *.safetensors files.

The stored drafts are GGUF files; their published names stand here once more, written out, so that a test
does not compare the package's table with itself. For one draft the file made here is the published one, byte
by byte: its hash is stored.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray

from pyggml_dflash.ggml.gguf import GgufFile
from tests.drafts.drafted import draft_file
from tests.reference.stored import MODELS, Kind

Stored = dict[str, tuple[str, NDArray[Any]]]  # name -> (type in the file, elements)
Change = Callable[[Stored], Stored]

OUTER = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}


def published_name(name: str) -> str:
    """What a tensor of a GGUF draft is called in a published one."""
    if name in OUTER:
        return OUTER[name]
    _, layer, rest = name.split(".", 2)
    return f"layers.{layer}.{LAYER[rest]}"


def draft_config(name: str) -> dict[str, Any]:
    """The published config.json of a stored draft."""
    config: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return config


def stored_tensors(name: str, kind: Kind = "F32") -> Stored:
    """The tensors of a stored draft under their published names."""
    return dict(_stored_tensors(name, kind))


@cache
def _stored_tensors(name: str, kind: Kind) -> Stored:
    with TemporaryDirectory() as folder, GgufFile.open(draft_file(name, Path(folder), kind)) as file:
        return {published_name(t.name): (t.type.name, _elements(file, t.name)) for t in file.tensors.values()}


def _elements(file: GgufFile, name: str) -> NDArray[Any]:
    t = file.tensors[name]
    return file.data(t).view({"F32": "<f4", "F16": "<f2"}[t.type.name]).reshape(t.shape[::-1]).copy()


def publish(
    name: str,
    folder: Path,
    *,
    kind: Kind = "F32",
    config: Mapping[str, Any] | None = None,
    change: Change = lambda tensors: tensors,
) -> Path:
    """A stored draft as a folder below `folder`, with values of config.json put in place of others."""
    path = folder / f"{name}-published"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(draft_config(name) | dict(config or {})))
    write_safetensors(path / "model.safetensors", change(stored_tensors(name, kind)))
    return path


def as_bf16(tensors: Stored) -> Stored:
    """Everything in BF16, vectors included, as most drafts are published; lower bits are cut off."""
    return {
        name: ("BF16", (values.astype("<f4").view("<u4") >> 16).astype("<u2"))
        for name, (_, values) in tensors.items()
    }


def header_of(tensors: Stored) -> dict[str, Any]:
    """The JSON header of a file, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, values) in tensors.items():
        end = offset + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    return header


def safetensors_bytes(header: Mapping[str, Any], data: bytes) -> bytes:
    """A file: length of the header, header padded to eight bytes, data."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_safetensors(path: Path, tensors: Stored) -> None:
    """The tensors as a file: wide elements first, then by name, as the published tools do."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0])))
    data = b"".join(values.tobytes() for _, values in ordered.values())
    path.write_bytes(safetensors_bytes(header_of(ordered), data))
