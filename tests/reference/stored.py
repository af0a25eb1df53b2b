"""Models with stored numbers, from tests/data/models, and what independent programs computed with them.

A folder there holds a model with its matrices in half precision, packed. Every matrix is exactly
representable so, hence the F32 file made from it has the very weights that the numbers belong to, and so has
the Q8_0 file: its blocks are made here as ggml makes them, and their hash is stored with the numbers.
"""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile, TensorInfo
from pyggml_dflash.ggml.gguf_writer import GgufWriter

Kind = Literal["F32", "F16", "Q8_0", "Q4_K_M"]
Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

DATA = Path(__file__).parents[1] / "data"
MODELS = DATA / "models"


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt: logits [k, n_vocab] after the tokens at `positions`; choice and margin after every one."""

    tokens: list[int]
    positions: Ids
    logits: Floats
    argmax: Ids
    margin: Floats  # distance from the best logit to the second


@dataclass(frozen=True, slots=True)
class StoredText:
    """A greedy continuation, end tokens ignored; `last_logits` are those that chose its last token."""

    prompt: list[int]
    tokens: list[int]
    margin: Floats
    last_logits: Floats | None


@dataclass(frozen=True, slots=True)
class Stored:
    """What was stored of a model file. `hidden`: values inside the forward of `hidden_tokens`, by name."""

    prompts: tuple[StoredPrompt, ...]
    texts: tuple[StoredText, ...]
    hidden_tokens: list[int]
    hidden: dict[str, Floats]


def stored(name: str, kind: Kind | None) -> Stored:
    """The numbers for a file of `kind`; None: those of single-precision arithmetic."""
    z = _arrays(name, kind)
    prompts = tuple(
        StoredPrompt(
            tokens=z[f"p{i}_tokens"].tolist(),
            positions=z[f"p{i}_pos"],
            logits=z[f"p{i}_logits"].astype(np.float32),
            argmax=z[f"p{i}_argmax"],
            margin=z[f"p{i}_margin"],
        )
        for i in range(sum(key.endswith("_pos") and key.startswith("p") for key in z))
    )
    texts = tuple(
        StoredText(
            prompt=z[f"g{i}_prompt"].tolist(),
            tokens=z[f"g{i}_tokens"].tolist(),
            margin=z[f"g{i}_margin"],
            last_logits=z.get(f"g{i}_last_logits"),
        )
        for i in range(sum(key.endswith("_prompt") for key in z))
    )
    hidden = {key: z[key] for key in z if key.startswith("h_") and key != "h_tokens"}
    return Stored(prompts, texts, z["h_tokens"].tolist() if hidden else [], hidden)


def _arrays(name: str, kind: Kind | None) -> dict[str, NDArray[Any]]:
    with np.load(MODELS / name / ("reference.npz" if kind is None else f"reference_{kind}.npz")) as arrays:
        return {key: arrays[key] for key in arrays.files}


def model_file(name: str, kind: Kind, folder: Path) -> Path:
    """The model as a GGUF file of `kind`, made in `folder` unless it is stored as such."""
    ready = (MODELS / name / f"{kind}.gguf", MODELS / f"{name}-{kind}.gguf")
    path = next(filter(Path.exists, ready), folder / f"{name}-{kind}.gguf")
    if not path.exists():
        packed = folder / f"{name}.gguf"
        packed.write_bytes(lzma.decompress((MODELS / name / "f16.gguf.xz").read_bytes()))
        with GgufFile.open(packed) as source:
            _converted(source, kind).write(path)
        packed.unlink()
    if kind in ("Q8_0", "Q4_K_M"):
        assert weights_hash(path) == str(_arrays(name, kind)["weights_sha256"])
    return path


def _converted(source: GgufFile, kind: Kind) -> GgufWriter:
    """The half-precision matrices as `kind`; all else stays F32, as converters leave it."""
    writer = GgufWriter()
    writer.copy_metadata(source)
    for tensor in source.tensors.values():
        values = _values(source, tensor)
        if kind == "F16":
            writer.add_tensor(tensor.name, values)
        elif kind == "F32" or values.dtype == np.float32 or _stays_single(tensor.name):
            writer.add_tensor(tensor.name, values.astype(np.float32))
        elif values.shape[-1] % ElementType.Q8_0.block:
            writer.add_tensor(tensor.name, values)  # rows that blocks do not fit
        else:
            blocks = q8_0_blocks(values.astype(np.float32))
            writer.add_raw(tensor.name, blocks, shape=tensor.shape, element=ElementType.Q8_0)
    return writer


def _stays_single(name: str) -> bool:
    """Convolutions, routers and indexers are left alone by quantisers."""
    return name.endswith(("ssm_conv1d.weight", "ffn_gate_inp.weight")) or ".indexer." in name


def _values(file: GgufFile, tensor: TensorInfo) -> NDArray[Any]:
    dtype = np.dtype(np.float16 if tensor.type == ElementType.F16 else np.float32)
    return file.data(tensor).view(dtype).reshape(tensor.shape[::-1])


def q8_0_blocks(values: Floats) -> NDArray[np.uint8]:
    """Rows as Q8_0: per 32 numbers the scale max|x| / 127 in half precision, then rounded multiples of it."""
    rows = values.reshape(-1, 32)
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = rows * inverse
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), rounded.view(np.uint8)], axis=1).reshape(-1)


def weights_hash(path: Path) -> str:
    """SHA-256 over the bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    with GgufFile.open(path) as file:
        for name in sorted(file.tensors):
            digest.update(file.data(file.tensors[name]).data)
    return digest.hexdigest()
