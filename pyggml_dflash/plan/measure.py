"""What graphs would take, without allocating them. Layer 3.

Whoever plans makes the engine's own parts with a dry ledger: they declare and charge what they always do,
and no memory is allocated. Graphs over them are measured by ggml's allocator. So a plan cannot forget a
tensor that the engine has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.graph import measure_graph
from pyggml_dflash.ggml.ops import GraphBuilder

Build = Callable[[], GraphBuilder]


def last_of_each_run(kind: Callable[[int], str], start: int, stop: int) -> list[int]:
    """For each kind that the numbers from `start` below `stop` have, in runs, the last number of its run.

    A kind must not come back once another has followed it.
    """
    found = []
    while start < stop:
        low, high = start, stop - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if kind(middle) == kind(start) else (low, middle - 1)
        found.append(low)
        start = low + 1
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBytes:
    """What one graph takes: compute memory on its device, headers and node list on the host."""

    compute: int = 0
    metadata: int = 0


class MemoryProbe:
    """Measures graphs of one backend, each key once; keys must name all that a graph's size depends on."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[Hashable, GraphBytes] = {}

    def graph(self, key: Hashable, build: Build) -> GraphBytes:
        """What the graph that `build` makes would take; the builder is closed."""
        if key not in self._known:
            builder = build()
            try:
                compute = measure_graph(self._backend, builder)
                self._known[key] = GraphBytes(compute=compute, metadata=builder.n_bytes)
            finally:
                builder.close()
        return self._known[key]

    def largest(self, graphs: Iterable[tuple[Hashable, Build]]) -> int:
        """Compute bytes of the largest of these graphs, 0 for none."""
        return max((self.graph(key, build).compute for key, build in graphs), default=0)
