"""The weights of a model: which tensors it needs, and where they live once loaded. Layer 2.

On a host device weights stay in the mapped file, or are copied into one of ggml's repacked layouts
where that computes faster. On other devices they are uploaded; the embedding table stays mapped,
since only a few of its rows are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pyggml_dflash.errors import DamagedFileError, UnsupportedModelError
from pyggml_dflash.ggml.arena import MappedArena, TensorArena, write
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_part import TensorInfo
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import WeightUse, buffer_type_name, can_compute, repacked_buffer_type
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.hot_experts import HotExperts

LOG: Final = logging.getLogger(__name__)
MAPPED_ALIGNMENT: Final = 32  # bytes; ggml's kernels may assume it, and files with odd alignments exist
UPLOAD_PIECE: Final = 16 * 2**20  # bytes between two progress reports
PINNED: Final = "pinned"  # kind of weights in host memory that the target copies at full speed
HEAD: Final = "output.weight"
EMBEDDING: Final = "token_embd.weight"

# No kernel multiplies with these; asked whether it can, ggml says yes, and then it ends the process.
NO_WEIGHTS: Final = frozenset(
    ElementType[name] for name in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")
)

LoadProgress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a forward uses: its name in the file, its shape, and what is done with it."""

    name: str
    shape: tuple[int, ...]
    use: WeightUse
    required: bool = True


def matrix(name: str, n_in: int, n_out: int, *, required: bool = True) -> tuple[TensorSpec, ...]:
    """A weight [n_in, n_out] with the companions a file may carry: a bias and a scalar scale."""
    stem = name.removesuffix(".weight")
    return (
        TensorSpec(name, (n_in, n_out), "matmul", required),
        TensorSpec(f"{stem}.bias", (n_out,), "vector", False),
        TensorSpec(f"{stem}.scale", (1,), "vector", False),
    )


def vector(name: str, n: int, *, required: bool = True) -> TensorSpec:
    """A row of single-precision numbers."""
    return TensorSpec(name, (n,), "vector", required)


def _same_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Equal but for trailing ones."""
    n = max(len(found), len(wanted))
    return (*found, *[1] * (n - len(found))) == (*wanted, *[1] * (n - len(wanted)))


def check_tensors(file: TensorFile, specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """The specs that the file satisfies, by name; a missing or misshapen tensor raises."""
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        info = file.tensors.get(spec.name)
        shown = file.shown(spec.name)
        if info is None:
            if spec.required:
                raise DamagedFileError(
                    f"{file.path}: tensor {shown!r} is missing; expected {list(spec.shape)}"
                )
            continue
        if not _same_shape(info.shape, spec.shape):
            raise DamagedFileError(
                f"{file.path}: tensor {shown!r} has shape {list(info.shape)}; expected {list(spec.shape)}"
            )
        if info.type in NO_WEIGHTS or (spec.use == "vector" and info.type != ElementType.F32):
            expected = "f32" if spec.use == "vector" else "a floating-point or quantised type of weights"
            raise UnsupportedModelError(
                f"{file.path}: tensor {shown!r} has type {info.type.label}; expected {expected}"
            )
        found[spec.name] = spec
    return found


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor of the model goes."""

    name: str  # in the model
    source: TensorInfo  # in the file
    spec: TensorSpec
    kind: str  # 'mapped', 'uploaded', 'pinned', or the name of a repacked layout
    device: int = 0  # of a backend and its peers, in this order


def place_weights(
    file: TensorFile,
    specs: dict[str, TensorSpec],
    target: Backend,
    *,
    repack: bool,
    device_of: Callable[[str], int] = lambda name: 0,
    plain: Container[str] = (),
    pinned: bool = False,
) -> list[Placement]:
    """Decide where every tensor goes, from the table alone; a tied head reads the embedding table.

    `device_of`: by a tensor's name, the place of its device among the target and its peers. `plain`: names
    of tensors that lie as they do in the file, whatever layout their device has; in `pinned` memory or not.
    """
    wanted = dict(specs)
    if HEAD not in wanted and EMBEDDING in wanted:
        wanted[HEAD] = TensorSpec(HEAD, specs[EMBEDDING].shape, "matmul")
    placements: list[Placement] = []
    for name, spec in wanted.items():
        info = file.tensors[name if name in specs else EMBEDDING]
        device = device_of(name)
        backend = target.all[device]
        in_place = spec.use == "rows" or (backend.is_host and info.offset % MAPPED_ALIGNMENT == 0)
        kind = "mapped" if in_place else "uploaded"
        if spec.use != "rows" or backend.is_host:
            packs = repack and name not in plain
            layout = repacked_buffer_type(backend, info.type, spec.shape, spec.use) if packs else None
            if layout is not None:
                kind = buffer_type_name(layout)
            elif not can_compute(backend, info.type, spec.shape, spec.use):
                what = f"tensor {file.shown(info.name)!r} of type {info.type.label}"
                raise UnsupportedModelError(f"{file.path}: {backend.name} cannot compute with {what}")
            elif pinned and name in plain:
                kind = PINNED
        placements.append(Placement(name, info, spec, kind, device))
    return placements


def _layouts(backend: Backend) -> dict[str, Any]:
    return {buffer_type_name(b): b for b in backend.extra_buffer_types()}


class LoadedWeights:
    """Every tensor of a model, on its device; owns their memory. Layer code asks by name.

    Placements count devices from `backend`, whose peers hold the others. With a dry ledger nothing is read
    or moved: the tensors are there for graphs to be measured. Outside of layers, what is not among the
    placements is asked of `base`, another model's weights, which must stay open longer.
    """

    def __init__(
        self,
        file: TensorFile,
        placements: list[Placement],
        backend: Backend,
        ledger: Ledger,
        progress: LoadProgress | None = None,
        *,
        label: str = "weights",
        base: LoadedWeights | None = None,
    ) -> None:
        """`label`: what the ledger calls them."""
        self.file, self._label, self._base = file, label, base
        self.n_bytes: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}
        with ExitStack() as stack:
            moved = [p for p in placements if p.kind != "mapped"]
            for i, own in enumerate(backend.all):
                here = [p for p in placements if p.device == i]
                self._place_mapped(stack, [p for p in here if p.kind == "mapped"], own, ledger)
                layouts = {PINNED: backend.pinned_buffer_type, **_layouts(own)}
                self._declare(stack, [p for p in here if p.kind != "mapped"], own, ledger, layouts)
            if not ledger.dry:
                self._fill(moved, backend.all, progress)
            self._stack = stack.pop_all()

    def _place_mapped(
        self, stack: ExitStack, mapped: list[Placement], backend: Backend, ledger: Ledger
    ) -> None:
        for part in sorted({p.source.part for p in mapped}):
            inside = [p for p in mapped if p.source.part == part]
            arena = MappedArena(self.file.mapping(part), n_tensors=len(inside))
            stack.callback(arena.close)
            for p in inside:
                self._tensors[p.name] = arena.place(p.name, p.source.type, p.spec.shape, p.source.offset)
        n_bytes = sum(p.source.n_bytes for p in mapped)
        self.n_bytes["mapped"] = self.n_bytes.get("mapped", 0) + n_bytes
        if backend.is_host and n_bytes:
            stack.callback(ledger.charge(backend.name, f"{self._label} (mapped)", n_bytes).release)

    def _declare(
        self,
        stack: ExitStack,
        moved: list[Placement],
        backend: Backend,
        ledger: Ledger,
        layouts: Mapping[str, Any],
    ) -> None:
        for kind in sorted({p.kind for p in moved}):
            inside = [p for p in moved if p.kind == kind]
            label = self._label if kind == "uploaded" else f"{self._label} ({kind})"
            arena = TensorArena(backend, ledger, label, n_tensors=len(inside), buffer_type=layouts.get(kind))
            stack.callback(arena.close)
            for p in inside:
                self._tensors[p.name] = arena.declare(p.name, p.source.type, *p.spec.shape)
            arena.allocate()
            if kind == PINNED and not ledger.dry and self._tensors[inside[0].name].memory == "CPU":
                LOG.warning("the driver gave no pinned memory: experts lie in ordinary memory")
            self.n_bytes[kind] = self.n_bytes.get(kind, 0) + arena.n_bytes

    def _fill(
        self, moved: list[Placement], backends: tuple[Backend, ...], progress: LoadProgress | None
    ) -> None:
        done, total = 0, sum(p.source.n_bytes for p in moved)
        if progress is not None and total:
            progress(0, total)
        for p in moved:
            data, tensor = self.file.data(p.source), self._tensors[p.name]
            is_plain = p.kind in ("uploaded", PINNED)
            piece = UPLOAD_PIECE if is_plain else p.source.n_bytes  # a layout takes whole tensors
            for start in range(0, p.source.n_bytes, piece):
                part = data[start : start + piece]
                write(tensor, part, start)
                backends[p.device].check_alive()  # one that is lost takes anything
                done += len(part)
                if progress is not None:
                    progress(done, total)
            self.file.forget(p.source)

    def adopt(self, hot: HotExperts) -> None:
        """Answer for these tensors too, and close them first."""
        self._tensors |= hot.tensors
        self._stack.callback(hot.close)

    @cached_property
    def types(self) -> frozenset[ElementType]:
        """Element types of all tensors."""
        return frozenset(tensor.type for tensor in self._tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.get(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def get(self, name: str) -> Tensor | None:
        """The tensor called `name`, or None if there is none."""
        own = self._tensors.get(name)
        if own is not None or self._base is None or name.startswith("blk."):
            return own
        return self._base.get(name)

    def block(self, i: int) -> BlockWeights:
        """The tensors of layer `i`, by the names they have after 'blk.I.'."""
        return BlockWeights(self, f"blk.{i}.")

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self._tensors.clear()
        self._stack.close()


class BlockWeights:
    """The tensors whose names share a prefix; asks its `LoadedWeights`."""

    __slots__ = ("_prefix", "_weights")

    def __init__(self, weights: LoadedWeights, prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._prefix + name]

    def get(self, name: str) -> Tensor | None:
        """The tensor called `name`, or None if the file has none."""
        return self._weights.get(self._prefix + name)

    def linear(self, g: GraphBuilder, name: str, x: Tensor) -> Tensor:
        """`name`.weight times x, with its scale and bias where the file has them."""
        y = g.mul_mat(self[f"{name}.weight"], x)
        scale, bias = self.get(f"{name}.scale"), self.get(f"{name}.bias")
        if scale is not None:
            y = g.mul(y, scale)
        return y if bias is None else g.add(y, bias)
