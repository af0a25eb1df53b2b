"""Graphs that run again, and giving graphs their memory: once more where an allocation fails. Layer 6."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.graph import GraphAllocator, StepGraph, measure_graph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import check_supported
from pyggml_dflash.ggml.tensor import Tensor

KEPT_GRAPHS: Final = 64  # of every kind together; the least recently used goes first

Relieve = Callable[[], object]  # gives back what can be made again, after an allocation that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNeeds:
    """Compute memory that graphs may take, in bytes: the largest of those that share an allocator, and all
    that are kept."""

    shared: int = 0
    kept: int = 0


@dataclass(slots=True)
class BuildCount:
    """How many graphs were built to be kept; a step in which it grows took longer than the next will."""

    n: int = 0


class GraphCache:
    """Graphs that run again, each with its memory, dropped in the order of their last use.

    The one used last stays whatever the limit, since its results may still be read.
    """

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        label: str,
        *,
        max_bytes: int | None = None,
        relieve: Relieve | None = None,
        built: BuildCount | None = None,
    ) -> None:
        """`max_bytes`: most compute memory of all graphs together; None: no limit. `built` counts along."""
        self._backend, self._ledger, self._label = backend, ledger, label
        self._max_bytes, self._relieve = max_bytes, relieve
        self._built = BuildCount() if built is None else built
        self._kept: OrderedDict[Hashable, tuple[StepGraph, GraphAllocator]] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], tuple[GraphBuilder, tuple[Tensor, ...]]]) -> StepGraph:
        """The graph of `key`, built on first use."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found[0]
        self._built.n += 1
        builder, outputs = build()
        self._make_room(builder)
        allocator = GraphAllocator(self._backend, self._ledger, self._label)
        try:
            graph = place(self._backend, builder, outputs, allocator, self._relieve)
        except BaseException:
            allocator.close()
            raise
        self._kept[key] = graph, allocator
        return graph

    def _make_room(self, builder: GraphBuilder) -> None:
        while len(self._kept) >= KEPT_GRAPHS:
            self._drop(*self._kept.popitem(last=False)[1])
        if self._max_bytes is None:
            return
        wanted = measure_graph(self._backend, builder)
        while len(self._kept) > 1 and self.n_bytes + wanted > self._max_bytes:
            self._drop(*self._kept.popitem(last=False)[1])

    @property
    def n_bytes(self) -> int:
        """Compute memory of all graphs."""
        return sum(allocator.n_bytes for _, allocator in self._kept.values())

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What is kept, the least recently used first."""
        return tuple(self._kept)

    @staticmethod
    def _drop(graph: StepGraph, allocator: GraphAllocator) -> None:
        graph.close()
        allocator.close()

    def close(self) -> None:
        """Free every graph."""
        for kept in self._kept.values():
            self._drop(*kept)
        self._kept.clear()


def place(
    backend: Backend,
    builder: GraphBuilder,
    outputs: tuple[Tensor, ...],
    allocator: GraphAllocator,
    relieve: Relieve | None = None,
) -> StepGraph:
    """Check that the device can run the graph and give it memory; on failure the builder is closed.

    Where memory lacks, `relieve` is called and the allocation tried once more.
    """
    try:
        check_supported(backend, builder)
        try:
            return StepGraph(backend, builder, outputs, allocator)
        except DeviceMemoryError:
            if relieve is None:
                raise
            relieve()
            return StepGraph(backend, builder, outputs, allocator)
    except BaseException:
        builder.close()
        raise
