"""Graphs that run: their memory, their fixed inputs, and measuring them without memory. Layer 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.arena import DTYPES, TensorArena, host_view
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.handle import Handle, check, check_pointer
from pyggml_dflash.ggml.ledger import Charge, Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor


@contextmanager
def _prepared(backend: Backend, builder: GraphBuilder) -> Iterator[CData]:
    """The graph as an allocator must see it: its backend has optimised it and keeps what it fuses.

    Without this the memory of a fused run's inputs may be given to the run's own results.
    """
    owner = ffi.new("struct ggml_context **")
    graph = check_pointer(lib.dflash_prepare_graph(backend.ptr, builder.graph, owner), "preparing a graph")
    try:
        yield graph
    finally:
        if owner[0] != ffi.NULL:
            lib.ggml_free(owner[0])


def measure_graph(backend: Backend, builder: GraphBuilder) -> int:
    """Bytes of compute memory that the graph would need, without allocating them."""
    with _prepared(backend, builder) as graph:
        return _measure(backend, graph)


def measure_scratch(backend: Backend, builder: GraphBuilder) -> int:
    """Bytes of scratch that a CPU takes for the graph's operations beside their results; 0 on other devices.

    The back end keeps the largest that any of its graphs wanted.
    """
    if not backend.is_host:
        return 0
    return int(lib.ggml_graph_plan(builder.graph, backend.n_threads, ffi.NULL).work_size)


def _measure(backend: Backend, graph: CData) -> int:
    allocator = lib.ggml_gallocr_new(backend.buffer_type)
    sizes = ffi.new("size_t[1]")
    try:
        lib.ggml_gallocr_reserve_n_size(allocator, graph, ffi.NULL, ffi.NULL, sizes)
    finally:
        lib.ggml_gallocr_free(allocator)
    return int(sizes[0])


class GraphAllocator(Handle):
    """Compute memory of one backend, shared by graphs that never run at the same time.

    It grows when a graph needs more and charges the ledger for what it holds. Graphs placed earlier stay
    good while it does not move, as `must_move` tells.
    """

    __slots__ = ("_backend", "_charge", "_ledger", "label")

    def __init__(self, backend: Backend, ledger: Ledger, label: str) -> None:
        super().__init__(lib.ggml_gallocr_new(backend.buffer_type), lib.ggml_gallocr_free, backend)
        self._backend, self._ledger, self.label = backend, ledger, label
        self._charge: Charge | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes held now."""
        return int(lib.ggml_gallocr_get_buffer_size(self.ptr, 0))

    def must_move(self, builder: GraphBuilder) -> bool:
        """True if the graph can be placed only where earlier ones lose their memory."""
        wanted = measure_graph(self._backend, builder)
        one_piece = int(lib.ggml_backend_buft_get_max_size(self._backend.buffer_type))
        return wanted > min(self.n_bytes, one_piece)

    def place(self, builder: GraphBuilder) -> None:
        """Give every node of the graph its address; raises `DeviceMemoryError` if there is no room."""
        device, held = self._backend.name, self.n_bytes
        with _prepared(self._backend, builder) as graph:
            wanted = _measure(self._backend, graph) if device in self._ledger.caps else 0
            self._ledger.charge(device, self.label, max(0, wanted - held)).release()
            # without a plan of its own, a graph with as many nodes would be laid out like the one before
            planned = lib.ggml_gallocr_reserve(self.ptr, graph)
            if not (planned and lib.ggml_gallocr_alloc_graph(self.ptr, graph)):
                wanted = _measure(self._backend, graph)
                self._start_anew()
                free = self._ledger.free(device, self._backend.memory_free())
                raise DeviceMemoryError(what=self.label, wanted=wanted, free=free, device=device)
        if self.n_bytes != held or self._charge is None:
            self._release_charge()
            self._charge = self._ledger.charge(device, self.label, self.n_bytes)

    def _start_anew(self) -> None:
        """Drop everything: after a failure ggml's allocator has no memory, but trusts its plan."""
        self.close()
        super().__init__(
            lib.ggml_gallocr_new(self._backend.buffer_type), lib.ggml_gallocr_free, self._backend
        )

    def _release_charge(self) -> None:
        if self._charge is not None:
            self._charge.release()
            self._charge = None

    def close(self) -> None:
        """Free the memory; graphs placed in it must not run again."""
        self._release_charge()
        super().close()


class Input:
    """One input of a graph: a device tensor and an array that is copied into it before a run.

    On a host device the array is the tensor's own memory and nothing is copied.
    """

    __slots__ = ("_backend", "_raw", "_shared", "array", "tensor")

    def __init__(self, backend: Backend, tensor: Tensor, *, dry: bool = False) -> None:
        """`dry`: the tensor has no memory, and the array is empty."""
        self._backend, self.tensor = backend.ptr, tensor
        self._shared = tensor.is_host
        if dry:
            self.array: npt.NDArray[Any] = np.empty(0, DTYPES[tensor.type])
        elif self._shared:
            self.array = host_view(tensor).reshape(-1)
        else:
            self.array = np.zeros(int(np.prod(tensor.shape)), DTYPES[tensor.type])
        self._raw: CData = ffi.from_buffer("char[]", self.array)

    def upload(self, start: int, stop: int) -> None:
        """Make elements [start, stop) of the array visible to work queued from now on."""
        if not self._shared:
            size = self.array.itemsize
            lib.ggml_backend_tensor_set_async(
                self._backend, self.tensor.ptr, self._raw + start * size, start * size, (stop - start) * size
            )


class InputArena:
    """The flat input tensors of a family of graphs, at addresses that never change."""

    def __init__(
        self, backend: Backend, ledger: Ledger, label: str, sizes: dict[str, tuple[ElementType, int]]
    ) -> None:
        with ExitStack() as stack:
            arena = TensorArena(backend, ledger, label, n_tensors=len(sizes))
            stack.callback(arena.close)
            tensors = {name: arena.declare(name, type, n) for name, (type, n) in sizes.items()}
            arena.allocate(zero=True)
            for tensor in tensors.values():
                lib.ggml_set_input(tensor.ptr)
            self._inputs = {name: Input(backend, tensor, dry=ledger.dry) for name, tensor in tensors.items()}
            self.n_bytes = arena.n_bytes
            self._stack = stack.pop_all()

    def __getitem__(self, name: str) -> Input:
        return self._inputs[name]

    def close(self) -> None:
        """Free the tensors and arrays."""
        self._inputs.clear()
        self._stack.close()


class StepGraph:
    """A graph that is placed and can run any number of times; reads its outputs into fixed arrays.

    `outputs` are contiguous tensors marked as outputs. `run` returns each as rows [n, shape[0]], in
    arrays that the next run overwrites.
    """

    def __init__(
        self, backend: Backend, builder: GraphBuilder, outputs: tuple[Tensor, ...], allocator: GraphAllocator
    ) -> None:
        allocator.place(builder)
        self._backend = backend
        self._builder = builder
        self._compute = lib.ggml_backend_graph_compute_async
        self._get = lib.ggml_backend_tensor_get_async
        self._synchronize = lib.ggml_backend_synchronize
        self._stream, self._graph = backend.ptr, builder.graph
        self._reads: list[tuple[CData, CData, int]] = []
        arrays: list[npt.NDArray[Any]] = []
        for tensor in outputs:
            array = np.empty((tensor.n_elements // tensor.shape[0], tensor.shape[0]), DTYPES[tensor.type])
            self._reads.append((tensor.ptr, ffi.from_buffer(array), array.nbytes))
            arrays.append(array)
        self._arrays = tuple(arrays)

    def run(self) -> tuple[npt.NDArray[Any], ...]:
        """Compute, wait, and return the outputs."""
        stream = self._stream
        status = self._compute(stream, self._graph)
        for tensor, target, n_bytes in self._reads:
            self._get(stream, tensor, target, 0, n_bytes)
        self._synchronize(stream)
        if status:
            check(status, "graph compute")
        return self._arrays

    def close(self) -> None:
        """Free the graph's headers; its memory belongs to the allocator."""
        self._arrays = ()
        self._builder.close()
