"""Graphs that run again, and giving graphs their memory: once more where an allocation fails. Layer 6."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.graph import GraphAllocator, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import check_supported
from pyggml_dflash.ggml.tensor import Tensor

KEPT_GRAPHS: Final = 64  # of every kind together; the least recently used goes first

Relieve = Callable[[], object]  # gives back what can be made again, after an allocation that failed


@dataclass(slots=True)
class BuildCount:
    """How many graphs were built to be kept; a step in which it grows took longer than the next will."""

    n: int = 0


class GraphCache:
    """Graphs that run again, and one piece of memory for all of them, which graphs that run once share.

    No two run at the same time, and what a graph returns is copied out, so the memory is as large as the
    largest needs it. When it has to grow, every kept graph is dropped, and built again when it is next asked
    for. Otherwise they are dropped in the order of their last use.
    """

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        label: str,
        *,
        relieve: Relieve | None = None,
        built: BuildCount | None = None,
    ) -> None:
        """`built` counts along."""
        self._backend, self._relieve = backend, relieve
        self._built = BuildCount() if built is None else built
        self._memory = GraphAllocator(backend, ledger, label)
        self._kept: OrderedDict[Hashable, StepGraph] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], tuple[GraphBuilder, tuple[Tensor, ...]]]) -> StepGraph:
        """The graph of `key`, built on first use."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found
        self._built.n += 1
        builder, outputs = build()
        while len(self._kept) >= KEPT_GRAPHS:
            self._kept.popitem(last=False)[1].close()
        self._kept[key] = graph = self.once(builder, outputs)
        return graph

    def once(self, builder: GraphBuilder, outputs: tuple[Tensor, ...]) -> StepGraph:
        """A graph that the caller runs before the next call, and closes; on failure the builder is closed."""
        before = self._memory.n_moves
        try:
            return place(self._backend, builder, outputs, self._memory, self._relieve)
        finally:
            if self._memory.n_moves != before:
                self._drop_all()

    @property
    def n_bytes(self) -> int:
        """Compute memory held."""
        return self._memory.n_bytes

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What is kept, the least recently used first."""
        return tuple(self._kept)

    def _drop_all(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()

    def clear(self) -> None:
        """Free every graph and give the memory back; the next use of one builds it again."""
        self._drop_all()
        self._memory.start_anew()

    def close(self) -> None:
        """Free every graph and the memory."""
        self._drop_all()
        self._memory.close()


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
