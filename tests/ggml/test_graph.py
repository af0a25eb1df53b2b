"""Graphs run again with the same numbers, full builders raise, and memory grows up to a cap."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from pyggml_dflash.errors import DeviceMemoryError, EngineClosed
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph, measure_graph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from tests.engine.apart import program

SIDE = 64


class Bench:
    """A backend, a ledger and a square matrix to compute with."""

    def __init__(self, caps: dict[str, int]) -> None:
        self.cpu = Backend(choose_device("CPU"), threads=1)
        self.ledger = Ledger(caps=caps)
        self.inputs = InputArena(self.cpu, self.ledger, "inputs", {"x": (ElementType.F32, SIDE * SIDE)})
        self.x = self.inputs["x"].array
        self.x[:] = np.random.default_rng(3).standard_normal(SIDE * SIDE)

    def rows(self, builder: GraphBuilder, n: int) -> Tensor:
        """The first `n` rows."""
        return builder.view(self.inputs["x"].tensor, (SIDE, n), (4 * SIDE,), 0)

    def products(self, n: int) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        """A graph of x x^T over the first `n` rows, and its output [n, n]."""
        builder = GraphBuilder(64)
        rows = self.rows(builder, n)
        return builder, (builder.output(builder.mul_mat(rows, rows)),)

    def expected(self, n: int) -> np.ndarray:
        rows = self.x.reshape(SIDE, SIDE)[:n].astype(np.float64)
        return rows @ rows.T

    def allocator(self) -> GraphAllocator:
        return GraphAllocator(self.cpu, self.ledger, "graph")

    def close(self) -> None:
        self.inputs.close()
        self.cpu.close()


@pytest.fixture
def caps() -> dict[str, int]:
    """Caps of the bench's ledger; a test may set them."""
    return {}


@pytest.fixture
def bench(caps: dict[str, int]) -> Iterator[Bench]:
    bench = Bench(caps)
    yield bench
    bench.close()


# reuse


def test_a_graph_that_runs_again_gives_the_same_bytes_in_the_same_arrays(bench: Bench) -> None:
    allocator = bench.allocator()
    graph = StepGraph(bench.cpu, *bench.products(SIDE), allocator)
    (first,) = graph.run()
    assert first.shape == (SIDE, SIDE)
    assert np.abs(first - bench.expected(SIDE)).max() < 1e-3
    kept = first.tobytes()
    for _ in range(5):
        (again,) = graph.run()
        assert again is first
        assert again.tobytes() == kept
    graph.close()
    allocator.close()


def test_inputs_are_read_anew_by_every_run(bench: Bench) -> None:
    allocator = bench.allocator()
    graph = StepGraph(bench.cpu, *bench.products(8), allocator)
    (first,) = graph.run()
    kept = first.copy()
    bench.x[:SIDE] *= 2
    bench.inputs["x"].upload(0, SIDE)
    (second,) = graph.run()
    assert second[0, 0] == pytest.approx(4 * kept[0, 0])
    assert second[1:, 1:].tolist() == kept[1:, 1:].tolist()
    assert np.abs(second - bench.expected(8)).max() < 1e-3
    graph.close()
    allocator.close()


def test_inputs_keep_their_address_and_start_as_zeros(bench: Bench) -> None:
    arena = InputArena(
        bench.cpu, bench.ledger, "more", {"a": (ElementType.I64, 7), "b": (ElementType.F16, 9)}
    )
    assert arena["a"].array.tolist() == [0] * 7
    assert arena["a"].array.dtype == np.int64
    assert arena["b"].array.dtype == np.float16
    assert arena["a"].array is arena["a"].array
    assert bench.ledger.by_label("CPU")["more"] == arena.n_bytes
    arena.close()
    with pytest.raises(KeyError):
        arena["a"]
    assert "more" not in bench.ledger.by_label("CPU")


def test_kept_graphs_with_their_own_memory_do_not_disturb_each_other(bench: Bench) -> None:
    allocators = [bench.allocator() for _ in range(3)]
    graphs = [
        StepGraph(bench.cpu, *bench.products(n), allocator)
        for n, allocator in zip((4, 32, SIDE), allocators, strict=True)
    ]
    for _ in range(2):
        for n, graph in zip((4, 32, SIDE), graphs, strict=True):
            assert np.abs(graph.run()[0] - bench.expected(n)).max() < 1e-3
    for graph, allocator in zip(graphs, allocators, strict=True):
        graph.close()
        allocator.close()


# memory


def test_an_allocator_grows_with_its_graphs_and_keeps_what_it_has(bench: Bench) -> None:
    allocator = bench.allocator()
    assert allocator.n_bytes == 0
    sizes = []
    for n in (4, 32, SIDE, 8, SIDE):
        builder, outputs = bench.products(n)
        measured = measure_graph(bench.cpu, builder)
        graph = StepGraph(bench.cpu, builder, outputs, allocator)
        assert np.abs(graph.run()[0] - bench.expected(n)).max() < 1e-3
        graph.close()
        sizes.append(allocator.n_bytes)
        assert allocator.n_bytes >= measured >= 4 * n * n
        assert bench.ledger.by_label("CPU")["graph"] == allocator.n_bytes
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] == sizes[-1]
    allocator.close()
    assert "graph" not in bench.ledger.by_label("CPU")
    with pytest.raises(EngineClosed, match="GraphAllocator"):
        _ = allocator.n_bytes


def test_measuring_takes_no_memory(bench: Bench) -> None:
    builder, _ = bench.products(SIDE)
    before = bench.ledger.charged("CPU")
    assert measure_graph(bench.cpu, builder) == measure_graph(bench.cpu, builder) > 0
    assert (bench.ledger.charged("CPU"), bench.ledger.peak("CPU")) == (before, before)
    builder.close()


def test_a_cap_refuses_a_graph_and_smaller_ones_still_run(bench: Bench, caps: dict[str, int]) -> None:
    allocator = bench.allocator()
    small = StepGraph(bench.cpu, *bench.products(8), allocator)
    expected = small.run()[0].copy()
    caps["CPU"] = bench.ledger.charged("CPU") + 1000
    for _ in range(3):
        builder, outputs = bench.products(SIDE)
        with pytest.raises(DeviceMemoryError) as raised:
            StepGraph(bench.cpu, builder, outputs, allocator)
        builder.close()
        assert (raised.value.what, raised.value.free) == ("graph", 1000)
        assert raised.value.wanted > 1000
        assert small.run()[0].tolist() == expected.tolist()
    small.close()
    again = StepGraph(bench.cpu, *bench.products(8), allocator)
    assert again.run()[0].tolist() == expected.tolist()
    again.close()
    del caps["CPU"]
    large = StepGraph(bench.cpu, *bench.products(SIDE), allocator)
    assert np.abs(large.run()[0] - bench.expected(SIDE)).max() < 1e-3
    large.close()
    allocator.close()


REFUSED = """
import resource, sys
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.graph import StepGraph
from pyggml_dflash.ggml.ops import GraphBuilder
from tests.ggml.test_graph import SIDE, Bench
bench = Bench({})
allocator = bench.allocator()
def graph(n):
    builder = GraphBuilder(64)
    x = builder.view(bench.inputs["x"].tensor, (1, 1), (4,), 0)
    column = builder.view(bench.inputs["x"].tensor, (1, SIDE * SIDE), (4,), 0)
    product = builder.mul_mat(column, column)  # 64 MiB
    for _ in range(n):
        product = builder.mul_mat(product, builder.mul_mat(column, column))
    return builder, (builder.output(product),)
def place(n):
    builder, outputs = graph(n)
    try:
        StepGraph(bench.cpu, builder, outputs, allocator)
        print("placed")
    except DeviceMemoryError as error:
        print(error.what, allocator.n_bytes, bench.ledger.by_label("CPU").get("graph", 0))
    finally:
        builder.close()
place(0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, -1))
place(3)
place(3)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
place(3)
allocator.close()
bench.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_memory_that_the_system_refuses_may_be_asked_for_again() -> None:
    done = program(REFUSED)
    assert (done.returncode, done.stdout) == (0, "placed\ngraph 0 0\ngraph 0 0\nplaced\n"), done.stderr


# builders


OVERFULL = """
import sys
from pyggml_dflash.errors import BackendError
from pyggml_dflash.ggml.arena import TensorArena
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
cpu = Backend(choose_device("CPU"), threads=1)
arena = TensorArena(cpu, Ledger(), "x", n_tensors=1000)
leaf = lambda: arena.declare("x", ElementType.F32, 4)
one, builder, n = leaf(), GraphBuilder(64), 0
try:
    x = one
    while n < 2000:
        if sys.argv[1] == "chain":
            x = builder.scale(x, 2.0)
        elif sys.argv[1] == "expanded":
            x = builder.expand(builder.scale(x, 2.0))
        elif sys.argv[1] == "views":
            builder.expand(builder.view(one, (1,), (), 4 * (n % 4)))
        elif sys.argv[1] == "leaves":
            x = builder.add(leaf(), leaf())
            builder.expand(x)
        n += 1
except BackendError as error:
    print(str(error), n < 64)
builder.close()
arena.close()
cpu.close()
"""


@pytest.mark.parametrize(
    "how",
    [
        "chain",
        "expanded",
        "views",
        "leaves",
    ],
)
def test_a_builder_that_runs_over_raises(how: str) -> None:
    done = program(OVERFULL, how)
    message = "the graph is larger than its builder was made for True\n"
    assert (done.returncode, done.stdout) == (0, message), done.stderr


def test_a_builder_counts_its_nodes_and_gives_its_memory_back() -> None:
    builder = GraphBuilder(64)
    assert builder.n_nodes == 0
    assert builder.n_bytes > 0
    builder.close()
    builder.close()


def test_nodes_run_in_the_order_of_the_calls(bench: Bench) -> None:
    """A copy into an input before and after it is read."""
    allocator = bench.allocator()
    builder = GraphBuilder(64)
    row = bench.rows(builder, 1)
    before = builder.output(builder.scale(row, 1.0))
    builder.expand(builder.copy(builder.scale(row, 3.0), row))
    after = builder.output(builder.scale(row, 1.0))
    graph = StepGraph(bench.cpu, builder, (before, after), allocator)
    start = bench.x[:SIDE].copy()
    for n in (1, 3):
        first, second = graph.run()
        assert first[0].tolist() == (start * np.float32(n)).tolist()
        assert second[0].tolist() == (start * np.float32(n) * np.float32(3)).tolist()
    graph.close()
    allocator.close()


def test_a_builder_that_is_closed_after_a_refusal_leaves_nothing(bench: Bench, caps: dict[str, int]) -> None:
    caps["CPU"] = bench.ledger.charged("CPU")
    allocator = bench.allocator()
    builder, outputs = bench.products(4)
    with pytest.raises(DeviceMemoryError):
        StepGraph(bench.cpu, builder, outputs, allocator)
    builder.close()
    allocator.close()
    assert bench.ledger.charged("CPU") == caps["CPU"]


def test_a_closed_graph_gives_its_outputs_back(bench: Bench) -> None:
    allocator = bench.allocator()
    graph = StepGraph(bench.cpu, *bench.products(4), allocator)
    graph.run()
    graph.close()
    assert graph._arrays == ()
    allocator.close()
