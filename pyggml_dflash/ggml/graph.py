"""Graphs that run: their memory, their fixed inputs, and measuring them without memory. Layer 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.arena import DTYPES, TensorArena, host_view
from pyggml_dflash.ggml.cut import Cut, Part, cut_of
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.handle import Handle, check, check_pointer
from pyggml_dflash.ggml.ledger import Charge, Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A graph as an allocator must see it, and the backends of operations and leafs if there are several."""

    graph: CData
    backends: tuple[Backend, ...]
    homes: tuple[CData, CData]

    def measure(self) -> tuple[int, ...]:
        """Bytes that the graph would take, by backend."""
        allocator = new_allocator(self.backends)
        sizes = ffi.new("size_t[]", len(self.backends))
        try:
            lib.ggml_gallocr_reserve_n_size(allocator, self.graph, *self.homes, sizes)
        finally:
            lib.ggml_gallocr_free(allocator)
        return tuple(sizes)


@contextmanager
def _prepared(backend: Backend, builder: GraphBuilder) -> Iterator[_Prepared]:
    """The graph as an allocator must see it: its backend has optimised it and keeps what it fuses.

    Without this the memory of a fused run's inputs may be given to the run's own results.
    """
    cut = cut_of(builder)
    if cut is not None:
        yield _Prepared(cut.graph, cut.backends, (cut.homes, cut.leaf_homes))
        return
    owner = ffi.new("struct ggml_context **")
    graph = check_pointer(lib.dflash_prepare_graph(backend.ptr, builder.graph, owner), "preparing a graph")
    try:
        yield _Prepared(graph, (backend,), (ffi.NULL, ffi.NULL))
    finally:
        if owner[0] != ffi.NULL:
            lib.ggml_free(owner[0])


def new_allocator(backends: Sequence[Backend]) -> CData:
    """ggml's allocator of compute memory on these backends."""
    types = ffi.new("ggml_backend_buffer_type_t[]", [b.buffer_type for b in backends])
    return lib.ggml_gallocr_new_n(types, len(backends))


def measure_graph(backend: Backend, builder: GraphBuilder) -> int:
    """Bytes of compute memory that the graph would need on all devices, without allocating them."""
    return sum(measure_by_device(backend, builder).values())


def measure_by_device(backend: Backend, builder: GraphBuilder) -> dict[str, int]:
    """Bytes of compute memory that the graph would need on each device, without allocating them."""
    with _prepared(backend, builder) as graph:
        return {b.name: n for b, n in zip(graph.backends, graph.measure(), strict=True)}


def measure_scratch(backend: Backend, builder: GraphBuilder) -> dict[str, int]:
    """Bytes of scratch that a CPU among the devices takes for operations beside their results.

    The back end keeps the largest that any of its graphs wanted.
    """
    cut = cut_of(builder)
    if cut is None:
        runs = [(backend, builder.graph)]
    else:
        runs = [(cut.backends[part.backend], part.graph) for part in cut.parts if part.computes]
    found: dict[str, int] = {}
    for own, graph in runs:
        if own.is_host:
            n = int(lib.ggml_graph_plan(graph, own.n_threads, ffi.NULL).work_size)
            found[own.name] = max(found.get(own.name, 0), n)
    return found


class GraphAllocator(Handle):
    """Compute memory of a backend and its peers, shared by graphs that never run at the same time.

    It grows when a graph needs more and charges the ledger for what it holds. Graphs placed earlier stay
    good while `n_moves` stays the same.
    """

    __slots__ = ("_backends", "_charges", "_ledger", "label", "n_moves")

    def __init__(self, backend: Backend, ledger: Ledger, label: str) -> None:
        super().__init__(new_allocator(backend.all), lib.ggml_gallocr_free, *backend.all)
        self._backends, self._ledger, self.label = backend.all, ledger, label
        self._charges: tuple[Charge, ...] = ()
        self.n_moves = 0  # how often graphs lost the memory that they were given

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes held now, by backend."""
        return tuple(int(lib.ggml_gallocr_get_buffer_size(self.ptr, i)) for i in range(len(self._backends)))

    @property
    def n_bytes(self) -> int:
        """Bytes held now, on all devices together."""
        return sum(self.held)

    @property
    def by_device(self) -> dict[str, int]:
        """Bytes held now on each device."""
        return {b.name: n for b, n in zip(self._backends, self.held, strict=True)}

    def place(self, builder: GraphBuilder) -> None:
        """Give every node of the graph its address; raises `DeviceMemoryError` if there is no room."""
        held = self.held
        with _prepared(self._backends[0], builder) as graph:
            if any(b.name in self._ledger.caps for b in graph.backends):
                self._check_caps(graph.measure(), held)
            # without a plan of its own, a graph with as many nodes would be laid out like the one before
            planned = lib.ggml_gallocr_reserve_n(self.ptr, graph.graph, *graph.homes)
            if not (planned and lib.ggml_gallocr_alloc_graph(self.ptr, graph.graph)):
                wanted = graph.measure()
                self.start_anew()
                raise self._refusal(wanted)
        self.n_moves += self._has_moved(held)
        if self.held != held or not self._charges:
            self._release_charges()
            self._charges = tuple(
                self._ledger.charge(b.name, self.label, n)
                for b, n in zip(self._backends, self.held, strict=True)
            )

    def _has_moved(self, before: tuple[int, ...]) -> bool:
        """True if a placement took new memory; what lies in several pieces may have, and hold no more."""
        pieces = (int(lib.ggml_backend_buft_get_max_size(b.buffer_type)) for b in self._backends)
        return self.held != before or any(n > most for n, most in zip(self.held, pieces, strict=True))

    def _check_caps(self, wanted: tuple[int, ...], held: tuple[int, ...]) -> None:
        for backend, n, has in zip(self._backends, wanted, held, strict=False):
            self._ledger.charge(backend.name, self.label, max(0, n - has)).release()

    def _refusal(self, wanted: tuple[int, ...]) -> DeviceMemoryError:
        """The error for the device that lacks most."""
        for backend in self._backends:
            backend.check_alive()
        free = [self._ledger.free(b.name, b.memory_free()) for b in self._backends]
        i = max(range(len(wanted)), key=lambda i: wanted[i] - free[i])
        device = self._backends[i].name
        return DeviceMemoryError(what=self.label, wanted=wanted[i], free=free[i], device=device)

    def start_anew(self) -> None:
        """Give the memory back; after a failure ggml's allocator has none, but trusts its plan."""
        self.close()
        self.n_moves += 1
        super().__init__(new_allocator(self._backends), lib.ggml_gallocr_free, *self._backends)

    def _release_charges(self) -> None:
        for charge in self._charges:
            charge.release()
        self._charges = ()

    def close(self) -> None:
        """Free the memory; graphs placed in it must not run again."""
        self._release_charges()
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
        self._builder = builder
        cut = cut_of(builder)
        self._backend, self._stream, self._graph = backend, backend.ptr, builder.graph
        self._compute = lib.ggml_backend_graph_compute_async
        self._get = lib.ggml_backend_tensor_get_async
        self._synchronize = lib.ggml_backend_synchronize
        self._parts = None if cut is None else PartsRun(cut)
        self._remote = tuple(b for b in backend.all if b.info.kind == "rpc")
        self._runs_ahead = not outputs and bool(self._remote)  # of a worker that is asked for nothing
        self._reads: list[tuple[CData, CData, CData, int]] = []
        arrays: list[npt.NDArray[Any]] = []
        for tensor in outputs:
            array = np.empty((tensor.n_elements // tensor.shape[0], tensor.shape[0]), DTYPES[tensor.type])
            stream = backend.ptr if cut is None else cut.backend_of(tensor).ptr
            self._reads.append((stream, tensor.ptr, ffi.from_buffer(array), array.nbytes))
            arrays.append(array)
        self._arrays = tuple(arrays)

    def run(self) -> tuple[npt.NDArray[Any], ...]:
        """Compute, wait, and return the outputs; without any, a worker may be at it still."""
        parts, stream, backend = self._parts, self._stream, self._backend
        backend.is_busy = True
        try:
            if self._runs_ahead and parts is None:
                backend.wait_for_answer()
            status = self._compute(stream, self._graph) if parts is None else parts.start(self._runs_ahead)
            for source, tensor, target, n_bytes in self._reads:
                self._get(source, tensor, target, 0, n_bytes)
            if parts is None:
                self._synchronize(stream)
            else:
                parts.wait()
        finally:
            backend.is_busy = False
        for remote in self._remote:
            remote.check_alive()
        if status:
            check(status, "graph compute")
        return self._arrays

    def close(self) -> None:
        """Free the graph's headers; its memory belongs to the allocator."""
        self._arrays, self._parts = (), None
        self._builder.close()


class _Links:
    """What comes to a part from other backends: into host memory with one wait for all, else one by one."""

    __slots__ = ("copies", "fetched", "sources")

    def __init__(self, cut: Cut, part: Part) -> None:
        reader = cut.backends[part.backend]
        links = [(cut.backends[c.home], c) for c in part.copies if not c.is_queued]
        fetched = [(b.ptr, c) for b, c in links if reader.is_host and not b.is_host]
        others = [(b.ptr, c) for b, c in links if not reader.is_host or b.is_host]
        self.fetched = [(s, c.source, c.twin.data, lib.ggml_nbytes(c.source)) for s, c in fetched]
        self.sources = list(dict.fromkeys(stream for stream, _ in fetched))
        self.copies = [(stream, reader.ptr, c.source, c.twin) for stream, c in others]


class PartsRun:
    """Runs the parts of a cut graph that has its memory, beat by beat; what a beat reads is copied first.

    It is copied part by part, since what a part reads may lie where a twin of the next one will.
    """

    __slots__ = ("_beats", "_compute", "_copy", "_get", "_queue", "_streams", "_synchronize")

    def __init__(self, cut: Cut) -> None:
        self._compute = lib.ggml_backend_graph_compute_async
        self._copy, self._synchronize = lib.ggml_backend_tensor_copy_async, lib.ggml_backend_synchronize
        self._get, self._queue = lib.ggml_backend_tensor_get_async, lib.ggml_backend_tensor_set_async
        streams = [b.ptr for b in cut.backends]
        self._beats = []
        met: set[int] = set()
        for _, group in groupby(cut.parts, lambda part: part.beat):
            parts = list(group)
            linked = [part for part in parts if any(not c.is_queued for c in part.copies)]
            queued = [(p.backend, c) for p in parts for c in p.copies if c.is_queued]
            computing = [part for part in parts if part.computes]
            # one in host memory last: its call returns when it is done
            computing.sort(key=lambda part: cut.backends[part.backend].is_host)
            new = sorted({p.backend for p in parts} - met)
            met.update(new)
            self._beats.append(
                (
                    [cut.backends[i] for i in new if cut.backends[i].info.kind == "rpc"],
                    [streams[part.backend] for part in linked],
                    [_Links(cut, part) for part in linked],
                    [(streams[to], c.twin, c.source.data, lib.ggml_nbytes(c.source)) for to, c in queued],
                    [(streams[part.backend], part.graph) for part in computing],
                )
            )
        self._streams = [streams[i] for i in sorted({part.backend for part in cut.parts})]

    def start(self, runs_ahead: bool = False) -> int:
        """Queue everything; the first status that is no success, else 0. `runs_ahead`: without outputs."""
        failed = 0
        for workers, streams, links, queued, graphs in self._beats:
            for worker in workers if runs_ahead else ():
                worker.wait_for_answer()  # to the run before
            for stream in streams:
                self._synchronize(stream)  # what lies where the twins go may still be read
            for link in links:
                for stream, source, data, n_bytes in link.fetched:
                    self._get(stream, source, data, 0, n_bytes)
                for stream in link.sources:
                    self._synchronize(stream)
                for source_stream, stream, source, twin in link.copies:
                    self._copy(source_stream, stream, source, twin)
            for stream, twin, data, n_bytes in queued:
                self._queue(stream, twin, data, 0, n_bytes)
            for stream, graph in graphs:
                failed = failed or self._compute(stream, graph)
        return failed

    def wait(self) -> None:
        """Wait for every backend that took part."""
        for stream in self._streams:
            self._synchronize(stream)
