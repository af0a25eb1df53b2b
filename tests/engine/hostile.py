"""Model files that are sound as GGUF and odd, or wrong, as models.

`edited` changes a good file; `written` makes a random model of any sizes that its architecture accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.arch import ARCHITECTURES
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile, TensorInfo
from pyggml_dflash.ggml.gguf_values import ValueType
from pyggml_dflash.ggml.gguf_writer import GgufWriter
from pyggml_dflash.model.weights import HEAD, TensorSpec

Array: TypeAlias = NDArray[Any]
NewTensor: TypeAlias = "tuple[ElementType, tuple[int, ...], Array]"
Keys: TypeAlias = Mapping[str, object]

_ATTENTION: Final[Keys] = {
    "block_count": 2,
    "context_length": 1024,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
    "rope.dimension_count": 16,
}
_HYBRID: Final[Keys] = {
    **_ATTENTION,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "full_attention_interval": 2,
}
_EXPERTS: Final[Keys] = {
    **_HYBRID,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 16,
    "expert_shared_feed_forward_length": 24,
}
BASES: Final[Mapping[str, Keys]] = {
    "llama": _ATTENTION,
    "qwen3": _ATTENTION,
    "qwen35": _HYBRID,
    "qwen35moe": _EXPERTS,
}

TEXTS: Final = tuple(f"t{i}" for i in range(64))


def edited(
    source: Path,
    target: Path,
    *,
    keys: Keys | None = None,
    without: tuple[str, ...] = (),
    tensors: Callable[[TensorInfo, Array], NewTensor | None] | None = None,
    n_parts: int = 1,
) -> Path:
    """A copy with metadata `keys` set and those `without` left out; returns its first part.

    `tensors` gets each tensor and its bytes and returns new type, shape and bytes, or None to leave it out.
    """
    keys = keys or {}
    writer = GgufWriter()
    with GgufFile.open(source) as file:
        writer.copy_metadata(file, without={*keys, *without})
        for key, value in keys.items():
            writer.set(key, value)
        for info in file.tensors.values():
            data = file.data(info)
            new = (info.type, info.shape, data) if tensors is None else tensors(info, data)
            if new is not None:
                element, shape, data = new
                writer.add_raw(info.name, data, shape=shape, element=element)
        return writer.write(target, n_parts=n_parts)[0]


def random_weights(spec: TensorSpec) -> Array:
    """F32 values of a tensor, the same ones for the same name."""
    rng = np.random.default_rng(list(spec.name.encode()))
    return rng.standard_normal(spec.shape[::-1]).astype(np.float32) * np.float32(0.1)


def written(
    path: Path,
    architecture: str,
    keys: Keys | None = None,
    *,
    texts: tuple[str, ...] = TEXTS,
    n_rows: int | None = None,
    weights: Callable[[TensorSpec], Array] = random_weights,
    optional: bool = False,
) -> Path:
    """A model of F32 weights whose tensors have the shapes that its metadata asks for.

    `keys` go over those of `BASES`, without the architecture's prefix. `texts` are the tokens, and the rows
    of the embedding table are as many unless `n_rows` says otherwise. `optional`: with every bias and scale
    that a file may have.
    """
    sizes = {**BASES[architecture], **(keys or {})}
    n_vocab = n_rows or len(texts)
    stub = path.with_suffix(".stub")
    writer = _headed(architecture, sizes, texts)
    width = sizes["embedding_length"]
    assert isinstance(width, int)
    writer.add_tensor("token_embd.weight", np.zeros((n_vocab, width), np.float32))
    writer.write(stub)
    with GgufFile.open(stub) as file:
        config = ARCHITECTURES[architecture].read_config(file, architecture)
        specs = ARCHITECTURES[architecture].tensors(config, file)
    stub.unlink()
    writer = _headed(architecture, sizes, texts)
    for spec in specs:
        if optional or spec.required or spec.name == HEAD:
            writer.add_tensor(spec.name, weights(spec))
    return writer.write(path)[0]


def _headed(architecture: str, sizes: Keys, texts: tuple[str, ...]) -> GgufWriter:
    writer = GgufWriter()
    writer.set("general.architecture", architecture)
    for key, value in sizes.items():
        writer.set(f"{architecture}.{key}", value)
    writer.set("tokenizer.ggml.model", "gpt2")
    writer.set("tokenizer.ggml.pre", "gpt-2")
    writer.set("tokenizer.ggml.tokens", texts)
    writer.set("tokenizer.ggml.merges", [], ValueType.STR)
    return writer
