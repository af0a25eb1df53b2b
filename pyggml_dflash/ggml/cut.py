"""A graph divided among backends: parts in the order of execution, and copies in front of each. Layer 1.

ggml's own scheduler is not used: it holds one graph at a time, wants a CPU among its backends and moves
operations by rules of its own. Here every operation runs where it was pinned. What a part reads from another
backend is copied into a twin once per run; twins lie in the graph's compute memory, so that measuring a graph
measures its links too. A copy waits until something needs it: what comes before runs beside the other
backend.

Two forwards in one graph, of which the second reads the state that the first one leaves, take turns: while
one backend has a part of the first, the other has the part before it of the second. Such a pair is a beat;
what its parts read is copied before either begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

from pyggml_dflash.ggml.arena import Context
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.ffi import CData, ffi, lib
from pyggml_dflash.ggml.handle import check_pointer
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.pins import Pins, address
from pyggml_dflash.ggml.tensor import Tensor

VIEWS = frozenset(
    (
        lib.GGML_OP_NONE,
        lib.GGML_OP_RESHAPE,
        lib.GGML_OP_VIEW,
        lib.GGML_OP_PERMUTE,
        lib.GGML_OP_TRANSPOSE,
    )
)
N_SOURCES = len(ffi.new("struct ggml_tensor *").src)


def _sources(node: CData) -> Iterator[tuple[int, CData]]:
    """The operands of an operation, with their places."""
    src = node.src
    for i in range(N_SOURCES):
        if src[i] != ffi.NULL:
            yield i, src[i]


@dataclass(slots=True)
class Copy:
    """What is copied in front of a part: a tensor of another backend into its twin on the part's."""

    source: CData
    twin: CData
    home: int  # backend of the source
    is_leaf: bool
    is_queued: bool = False  # plain memory that this graph leaves as it is, for another device's stream


@dataclass(slots=True)
class Part:
    """Operations of one backend that run one after the other, and what has to be there before."""

    backend: int
    beat: int  # parts of one beat run beside each other
    views: list[CData] = field(default_factory=list)  # of other backends, which fall between two parts
    copies: list[Copy] = field(default_factory=list)
    nodes: list[CData] = field(default_factory=list)
    waits_for: int = -1  # the last part whose results are copied
    computes: bool = False
    graph: CData = None  # its operations as ggml's backend gets them


class Cut:
    """The parts of one graph over `pins.backends`, ready to be given memory; rewires the graph's operands.

    `graph`, `homes` and `leaf_homes` are what an allocator needs: the operations with twins and markers among
    them, and the backend of each.
    """

    def __init__(self, builder: GraphBuilder, pins: Pins) -> None:
        self._pins, self.parts = pins, list[Part]()
        self._home: dict[int, int] = {}
        self._made_in: dict[int, int] = {}  # operation -> index of its part
        self._written: dict[int, int] = {}  # what operations write in place -> the last part that does
        self._twins: dict[tuple[int, int], tuple[CData, int]] = {}  # and the part before which it is copied
        nodes = [lib.ggml_graph_node(builder.graph, i) for i in range(builder.n_nodes)]
        with ExitStack() as stack:
            self._settle(nodes)
            n_crossing = self._count_crossing(nodes)
            context = Context(2 * n_crossing, 4 * (len(nodes) + n_crossing) + 64)
            stack.callback(context.close)
            self._context = context.ptr
            ends = [*builder.forwards, len(nodes)]
            self._takes_turns = len(ends) > 2
            if self._takes_turns:
                self._place_in_turns([self._runs(nodes[i:j]) for i, j in pairwise(ends)])
            else:
                for node in nodes:
                    self._place(node)
            self._find_queued()
            self._write_back(builder.graph)
            self._prepare(stack, builder.graph, 4 * (len(nodes) + n_crossing) + 64)
            self._stack = stack.pop_all()

    def _settle(self, nodes: list[CData]) -> None:
        """Find every operation's backend."""
        pins, home = self._pins, self._home
        for node in nodes:
            at = pins.get(node)
            if at is not None:
                home[address(node)] = at
        for node in reversed(nodes):  # what ggml made on the way to an operation goes with it
            for _, x in _sources(node):
                if x.op != lib.GGML_OP_NONE:
                    home.setdefault(address(x), home[address(node)])
        for node in nodes:
            root = node.view_src
            if root != ffi.NULL:
                is_leaf = root.op == lib.GGML_OP_NONE
                home[address(node)] = pins.home(root) if is_leaf else home[address(root)]

    def _home_of(self, x: CData) -> int:
        found = self._home.get(address(x))
        return self._pins.home(x) if found is None else found

    def _count_crossing(self, nodes: list[CData]) -> int:
        pairs = set()
        for node in nodes:
            at = self._home[address(node)]
            pairs |= {(address(x), at) for _, x in _sources(node) if self._home_of(x) != at}
        return len(pairs)

    def _runs(self, nodes: list[CData]) -> list[tuple[int, list[CData]]]:
        """Operations of a forward in runs of one backend each; views go along."""
        runs: list[tuple[int, list[CData]]] = []
        waiting: list[CData] = []
        for node in nodes:
            at = self._home[address(node)]
            if int(node.op) in VIEWS:
                (runs[-1][1] if runs else waiting).append(node)
            elif runs and runs[-1][0] == at:
                runs[-1][1].append(node)
            else:
                runs.append((at, [*waiting, node]))
                waiting = []
        return runs

    def _place_in_turns(self, streams: list[list[tuple[int, list[CData]]]]) -> None:
        """Runs of forwards in beats: in each, every forward is one run behind the one in front of it."""
        beat = -1
        for turn in range(max(i + len(runs) for i, runs in enumerate(streams))):
            busy: set[int] = set()
            for i, runs in enumerate(streams):
                if not 0 <= turn - i < len(runs):
                    continue
                at, nodes = runs[turn - i]
                if not busy or at in busy:
                    beat, busy = beat + 1, set()
                busy.add(at)
                self.parts.append(Part(at, beat))
                for node in nodes:
                    self._place(node)

    def _place(self, node: CData) -> None:
        at = self._home[address(node)]
        is_view = int(node.op) in VIEWS
        if is_view and self.parts and self.parts[-1].backend != at:
            self.parts[-1].views.append(node)  # its root lies in an earlier part or is a leaf
            return
        if not self.parts or self.parts[-1].backend != at:
            self.parts.append(Part(at, len(self.parts)))
        for i, x in _sources(node):
            if self._home_of(x) != at:
                node.src[i] = self._twin(x, at)
        part = self.parts[-1]
        part.nodes.append(node)
        part.computes = part.computes or not is_view
        if node.view_src == ffi.NULL:
            self._made_in[address(node)] = len(self.parts) - 1
        elif not is_view:
            self._written[address(node.view_src)] = len(self.parts) - 1

    def _twin(self, x: CData, at: int) -> CData:
        """The copy of `x` on a backend, made in front of the newest part, which it may begin."""
        key = address(x), at
        root = x if x.view_src == ffi.NULL else x.view_src
        written = self._written.get(address(root), -1)
        if key in self._twins:
            twin, copied_in = self._twins[key]
            assert written < copied_in, f"{Tensor(x)!r} changes between two that read it elsewhere"
            return twin
        twin = lib.ggml_dup_tensor(self._context, x)
        for i in range(4):
            twin.nb[i] = x.nb[i]
        is_leaf = bool(root.op == lib.GGML_OP_NONE)  # inputs and weights are there before the graph runs
        made_in = max(written, -1 if is_leaf else self._made_in[address(root)])
        part = self.parts[-1]
        is_weight = is_leaf and not root.flags & lib.GGML_TENSOR_FLAG_INPUT  # large: no room for two at once
        if self._takes_turns:
            assert made_in < 0 or self.parts[made_in].beat < part.beat, f"{Tensor(x)!r} comes too late"
        elif part.computes and (made_in > part.waits_for or is_weight):
            part = Part(at, len(self.parts))
            self.parts.append(part)
        part.waits_for = max(part.waits_for, made_in)
        self._twins[key] = twin, len(self.parts) - 1
        part.copies.append(Copy(x, twin, self._home_of(x), is_leaf))
        return twin

    def _find_queued(self) -> None:
        """Mark the copies that no operation can overtake: the order of the reader's stream is enough."""
        for part in self.parts:
            for copy in part.copies:
                root = copy.source if copy.source.view_src == ffi.NULL else copy.source.view_src
                from_host = self.backends[copy.home].is_host and not self.backends[part.backend].is_host
                copy.is_queued = from_host and copy.is_leaf and address(root) not in self._written

    def _write_back(self, graph: CData) -> None:
        """Give the graph its operations in the order of the parts, so that each part is a run of them."""
        nodes, n = lib.ggml_graph_nodes(graph), 0
        for part in self.parts:
            for node in (*part.views, *part.nodes):
                nodes[n] = node
                n += 1

    def _prepare(self, stack: ExitStack, graph: CData, size: int) -> None:
        """Let each backend order and mark its parts, and list everything for the allocator."""
        self.graph = lib.ggml_new_graph_custom(self._context, size, False)
        homes, first = list[int](), 0
        for part in self.parts:
            first += len(part.views)
            run = check_pointer(
                lib.dflash_graph_part(graph, first, first + len(part.nodes)), "a graph's part"
            )
            stack.callback(lib.dflash_free_part, run)
            first += len(part.nodes)
            part.graph = run
            for view in part.views:
                self._list(view, self._home[address(view)], homes)
            for copy in part.copies:
                if not copy.is_leaf:  # keeps the source's memory until it is copied
                    marker = lib.ggml_view_tensor(self._context, copy.source)
                    marker.src[0] = copy.source
                    self._list(marker, copy.home, homes)
                self._list(copy.twin, part.backend, homes)
            owner = ffi.new("struct ggml_context **")
            backend = self._pins.backends[part.backend]
            prepared = lib.dflash_prepare_graph(backend.ptr, run, owner)
            check_pointer(prepared, "preparing a graph")
            if owner[0] != ffi.NULL:
                stack.callback(lib.ggml_free, owner[0])
            for i in range(lib.ggml_graph_n_nodes(prepared)):
                self._list(lib.ggml_graph_node(prepared, i), part.backend, homes)
        self.homes = ffi.new("int[]", homes)
        n_leafs = lib.dflash_copy_leafs(graph, self.graph)
        self.leaf_homes = ffi.new("int[]", max(1, n_leafs))  # all have memory: read, never used

    def _list(self, node: CData, at: int, homes: list[int]) -> None:
        lib.ggml_graph_add_node(self.graph, node)
        homes.append(at)

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends, as parts and `homes` count them."""
        return self._pins.backends

    def backend_of(self, x: Tensor) -> Backend:
        """The backend whose memory a result lies in."""
        return self._pins.backends[self._home_of(x.ptr)]

    def close(self) -> None:
        """Free twins and parts; before the graph's builder."""
        self.parts.clear()
        self._stack.close()


def cut_of(builder: GraphBuilder) -> Cut | None:
    """How a builder's graph is divided, made on first use, closed with the builder; None for one backend."""
    if builder.pins is None:
        return None
    if builder.cut is None:
        cut = Cut(builder, builder.pins)
        builder.closes_with(cut.close)
        builder.cut = cut
    assert isinstance(builder.cut, Cut)
    return builder.cut
