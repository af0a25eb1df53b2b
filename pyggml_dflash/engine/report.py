"""What is in a GGUF file, and what it would take to run it: a frozen report, made without loading. Layer 6.

A file of an architecture that this package does not run is reported as well, with the reason; only a
file that cannot be read raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from pyggml_dflash.arch import architecture_of
from pyggml_dflash.engine.assembly import Settings, settle
from pyggml_dflash.errors import ModelFileError
from pyggml_dflash.ggml.gguf import GgufFile, MetaValue, Strings, TensorInfo
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.vocab import read_vocab
from pyggml_dflash.model.weights import check_tensors
from pyggml_dflash.options import EngineOptions, KVType, as_path

TensorKind = Literal[
    "embedding", "attention", "delta net", "feed-forward", "experts", "norms and other", "draft block", "head"
]
MetaSummary: TypeAlias = "str | int | float | bool"

_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)")
_ARRAY_ITEMS: Final = 6  # array elements that a summary shows


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor; `shape` in ggml order, fastest first."""

    name: str
    type: str
    shape: tuple[int, ...]
    n_params: int
    n_bytes: int
    kind: TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShare:
    """What the tensors of one kind, or of one element type, add up to."""

    name: str
    n_tensors: int
    n_params: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The numbers of a model whose architecture is known."""

    n_layer: int  # of the trunk
    n_draft_layer: int  # MTP blocks behind it
    n_attention_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    n_expert: int
    n_expert_used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """Bytes of one slot's state at a context: KV cache, which grows with it, and recurrent state."""

    n_ctx: int
    cache_type_k: str
    cache_type_v: str
    kv_bytes: int
    recurrent_bytes: int

    @property
    def n_bytes(self) -> int:
        """Both together."""
        return self.kv_bytes + self.recurrent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A model file as it is. `reason` says why it is not supported, if so.

    `sizes` and `state` are None where the configuration cannot be read, as of an unknown architecture.
    """

    path: Path
    n_files: int
    n_bytes: int
    gguf_version: int
    architecture: str
    name: str
    n_params: int
    supported: bool
    reason: str | None
    sizes: ModelSizes | None
    state: StateReport | None
    kinds: tuple[TensorShare, ...]
    types: tuple[TensorShare, ...]
    metadata: Mapping[str, MetaSummary] = field(repr=False)  # an array is its type and first elements
    tensors: tuple[TensorReport, ...] = field(repr=False)


def inspect_model(
    path: Path | str, *, n_ctx: int | None = None, cache_type_k: KVType = "f16", cache_type_v: KVType = "f16"
) -> ModelReport:
    """Read a file's header and table; weights are not touched.

    `n_ctx` and the cache types are those of `EngineOptions` and are refused as there, with `UsageError`.
    A file that cannot be read raises `ModelFileError`.
    """
    options = EngineOptions(max_ctx=n_ctx, cache_type_k=cache_type_k, cache_type_v=cache_type_v)
    with GgufFile.open(as_path("model", path)) as file:
        config, reason = _read_model(file)
        settings = None if config is None else settle(options, architecture_of(file)[1], config)
        tensors = _tensor_reports(file)
        return ModelReport(
            path=file.path,
            n_files=len(file.parts),
            n_bytes=file.n_bytes,
            gguf_version=file.version,
            architecture=_text(file, "general.architecture", ""),
            name=_text(file, "general.name", file.path.stem),
            n_params=sum(t.n_params for t in tensors),
            supported=reason is None,
            reason=reason,
            sizes=None if config is None else _sizes(config),
            state=None if settings is None else _state(settings),
            kinds=_shares(((t.kind, t) for t in tensors), get_args(TensorKind)),
            types=_shares(((t.type, t) for t in tensors), ()),
            metadata={key: _summary(value, file.value_types[key]) for key, value in file.metadata.items()},
            tensors=tensors,
        )


def _read_model(file: GgufFile) -> tuple[ModelConfig | None, str | None]:
    """The configuration, as far as it can be read, and why the model cannot run, if so."""
    config = None
    try:
        name, architecture = architecture_of(file)
        config = architecture.read_config(file, name)
        check_tensors(file, architecture.tensors(config, file))
        read_vocab(file.metadata)
    except ModelFileError as error:
        return config, str(error).removeprefix(f"{file.path}: ")
    return config, None


def _sizes(config: ModelConfig) -> ModelSizes:
    return ModelSizes(
        n_layer=config.n_layer,
        n_draft_layer=config.n_mtp,
        n_attention_layer=len(config.attention_layers),
        n_embd=config.n_embd,
        n_head=config.n_head,
        n_head_kv=config.n_head_kv,
        head_dim=config.head_dim,
        n_vocab=config.n_vocab,
        n_ctx_train=config.n_ctx_train,
        n_expert=0 if config.moe is None else config.moe.n_expert,
        n_expert_used=0 if config.moe is None else config.moe.n_used,
    )


def _state(settings: Settings) -> StateReport:
    layout = settings.layout
    return StateReport(
        n_ctx=settings.n_ctx,
        cache_type_k=settings.type_k.label,
        cache_type_v=settings.type_v.label,
        kv_bytes=layout.slot_bytes - layout.recurrent_bytes,
        recurrent_bytes=layout.recurrent_bytes,
    )


def _tensor_reports(file: GgufFile) -> tuple[TensorReport, ...]:
    trunk = _trunk_layers(file)
    recurrent = {int(m[1]) for m in map(_BLOCK.fullmatch, file.tensors) if m and m[2].startswith("ssm_")}

    def report(t: TensorInfo) -> TensorReport:
        return TensorReport(
            name=t.name,
            type=t.type.label,
            shape=t.shape,
            n_params=t.n_elements,
            n_bytes=t.n_bytes,
            kind=tensor_kind(t.name, trunk=trunk, recurrent=recurrent),
        )

    return tuple(report(t) for t in file.tensors.values())


def _trunk_layers(file: GgufFile) -> int | None:
    """Layers in front of the draft blocks; None where the file does not tell in the usual way."""
    prefix = _text(file, "general.architecture", "")
    n_all, n_draft = (
        file.metadata.get(f"{prefix}.{key}", 0) for key in ("block_count", "nextn_predict_layers")
    )
    if not isinstance(n_all, int) or not isinstance(n_draft, int) or n_all == 0:
        return None
    return n_all - n_draft


def tensor_kind(name: str, *, trunk: int | None, recurrent: Iterable[int]) -> TensorKind:
    """What a tensor is for, from its name; `recurrent` are the layers with a delta net."""
    match = _BLOCK.fullmatch(name)
    layer, rest = (None, name) if match is None else (int(match[1]), match[2])
    if rest.startswith("nextn.") or (layer is not None and trunk is not None and layer >= trunk):
        return "draft block"
    if "norm" in rest:
        return "norms and other"
    if layer is None:
        return "embedding" if "embd" in rest else "head" if rest.startswith("output.") else "norms and other"
    if "_exps" in rest or "_shexp" in rest or rest.startswith("ffn_gate_inp"):
        return "experts"
    if rest.startswith("ffn_"):
        return "feed-forward"
    if rest.startswith("ssm_") or (rest.startswith("attn_") and layer in recurrent):
        return "delta net"
    return "attention" if rest.startswith("attn_") else "norms and other"


def _shares(named: Iterable[tuple[str, TensorReport]], order: tuple[str, ...]) -> tuple[TensorShare, ...]:
    """Sums by name, in the given order; without one, most bytes first."""
    groups: dict[str, list[TensorReport]] = {name: [] for name in order}
    for name, tensor in named:
        groups.setdefault(name, []).append(tensor)
    shares = [
        TensorShare(
            name=name,
            n_tensors=len(group),
            n_params=sum(t.n_params for t in group),
            n_bytes=sum(t.n_bytes for t in group),
        )
        for name, group in groups.items()
        if group
    ]
    return tuple(shares if order else sorted(shares, key=lambda share: -share.n_bytes))


def _summary(value: MetaValue, value_type: str) -> MetaSummary:
    if not isinstance(value, (np.ndarray, Strings)):
        return value
    items = value[:_ARRAY_ITEMS].tolist() if isinstance(value, np.ndarray) else value[:_ARRAY_ITEMS]
    rest = ", ..." if len(value) > _ARRAY_ITEMS else ""
    return f"{value_type}: {', '.join(map(repr, items))}{rest}"


def _text(file: GgufFile, key: str, default: str) -> str:
    """A string of the metadata; the default if it is absent or something else."""
    value = file.metadata.get(key)
    return value if isinstance(value, str) and value else default
