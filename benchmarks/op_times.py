"""Where a graph's time goes: each kind of operation alone, and the graph without it.

A placed graph is run with some of its nodes switched off, which leaves the others their memory and their
order. `alone` is the time of a kind with everything else off, `saved` what the whole graph gains without it.
Neither adds up to the whole: fused operations come apart when one of them is off, and on a GPU the start of
a kernel overlaps the end of the one before.

Nodes that make indices are never off, since others read them as addresses. What they are made from may be
garbage then, which only the sorting kernels of GPUs bear: graphs with experts are for those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

from inside import compute

from pyggml_dflash.ggml.arena import TensorArena
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import CData, c_string, ffi, lib
from pyggml_dflash.ggml.graph import GraphAllocator, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor

VIEWS: Final = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
INDEX_TYPES: Final = (ElementType.I32, ElementType.I64)
WARM_UP: Final = 3  # CUDA graphs are recorded in the second run and replayed from the third on
COPY_BYTES: Final = 2**29  # of a GPU; more than any cache holds
HOST_COPY_BYTES: Final = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTime:
    """Operations of one kind in a graph; times in milliseconds."""

    kind: str
    n: int
    n_bytes: int  # read and written, each operand once per operation
    alone_ms: float
    saved_ms: float

    @property
    def gb_s(self) -> float:
        """Bytes per second alone, in units of 10^9."""
        return self.n_bytes / self.alone_ms / 1e6 if self.alone_ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProfile:
    """A graph's time as a whole and by kind, the slowest first."""

    whole_ms: float
    n_nodes: int  # that compute
    kinds: tuple[KindTime, ...]


def profile(backend: Backend, graph: StepGraph, n_repeat: int) -> GraphProfile:
    """Time a kept graph and every kind of its operations. What the graph writes is garbage afterwards."""
    nodes = [node for node in _nodes(graph) if _name(node) not in VIEWS]
    fixed = [node for node in nodes if ElementType(node.type) in INDEX_TYPES]
    if fixed and backend.is_host:
        raise ValueError("graphs that choose experts can be taken apart on GPUs only")
    free = [node for node in nodes if ElementType(node.type) not in INDEX_TYPES]
    kinds = sorted({_kind(node) for node in free})
    whole_ms = _time(lambda: compute(graph), n_repeat)
    found = []
    for kind in kinds:
        own = [node for node in free if _kind(node) == kind]
        with _off(backend, graph, [node for node in free if _kind(node) != kind]):
            alone_ms = _time(lambda: compute(graph), n_repeat)
        with _off(backend, graph, own):
            saved_ms = whole_ms - _time(lambda: compute(graph), n_repeat)
        n_bytes = sum(map(_bytes, own))
        found.append(KindTime(kind=kind, n=len(own), n_bytes=n_bytes, alone_ms=alone_ms, saved_ms=saved_ms))
    found.sort(key=lambda kind: -kind.alone_ms)
    return GraphProfile(whole_ms=whole_ms, n_nodes=len(nodes), kinds=tuple(found))


def copy_gb_s(backend: Backend, ledger: Ledger, n_repeat: int) -> float:
    """What the device copies in its memory, bytes read and written, in units of 10^9 per second."""
    size = HOST_COPY_BYTES if backend.is_host else COPY_BYTES
    with ExitStack() as stack:
        arena = stack.enter_context(closing(TensorArena(backend, ledger, "copies", n_tensors=2)))
        source, target = (arena.declare(name, ElementType.F32, size // 4) for name in ("source", "target"))
        arena.allocate(zero=True)
        allocator = stack.enter_context(closing(GraphAllocator(backend, ledger, "copies")))
        builder = GraphBuilder(64)
        builder.expand(builder.copy(source, target))
        graph = stack.enter_context(closing(StepGraph(backend, builder, (), allocator)))
        return 2 * size / _time(lambda: compute(graph), n_repeat) / 1e6


def _time(run: Callable[[], None], n_repeat: int) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(WARM_UP + n_repeat):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e3 * median(times[WARM_UP:])


def _nodes(graph: StepGraph) -> Iterator[CData]:
    for i in range(lib.ggml_graph_n_nodes(graph._graph)):
        yield lib.ggml_graph_node(graph._graph, i)


def _name(node: CData) -> str:
    return c_string(lib.ggml_op_name(node.op))


def _kind(node: CData) -> str:
    """The operation, and for products the weights' type."""
    name = _name(node)
    if not name.startswith("MUL_MAT"):
        return name
    return f"{name} {ElementType(node.src[0].type).name}"


def _bytes(node: CData) -> int:
    """Bytes that one operation reads and writes; of tables only the rows it takes."""
    result, name = Tensor(node), _name(node)
    sources = [Tensor(source) for source in node.src if source != ffi.NULL]
    if name == "GET_ROWS":
        return 2 * result.n_bytes
    if name == "SET_ROWS":
        return 2 * sources[0].n_bytes
    if name == "CPY":
        return 2 * result.n_bytes
    if name == "MUL_MAT_ID":
        experts, rows, ids = sources[0], sources[1], sources[2]
        share = min(1.0, ids.n_elements / experts.shape[2])
        return int(share * experts.n_bytes) + rows.n_bytes + result.n_bytes
    return sum(source.n_bytes for source in sources) + result.n_bytes


@contextmanager
def _off(backend: Backend, graph: StepGraph, nodes: Iterable[CData]) -> Iterator[None]:
    """The graph with some nodes doing nothing."""
    saved = [(node, node.op) for node in nodes]
    try:
        for node, _ in saved:
            node.op = lib.GGML_OP_NONE
        _renumber(backend, graph)
        yield
    finally:
        for node, op in saved:
            node.op = op
        _renumber(backend, graph)


def _renumber(backend: Backend, graph: StepGraph) -> None:
    """Let the backend see that the graph is another one, since it replays what it has recorded of it."""
    owner = ffi.new("struct ggml_context **")
    lib.dflash_prepare_graph(backend.ptr, graph._graph, owner)
    if owner[0] != ffi.NULL:
        lib.ggml_free(owner[0])
