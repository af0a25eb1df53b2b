"""Kept graphs share one piece of memory, are built again when it moved, and never change an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from pyggml_dflash.engine.graph_cache import GraphCache
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.errors import DeviceMemoryError
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.options import EngineOptions
from tests.engine.apart import program
from tests.engine.tiny import QWEN3, QWEN35, prompt
from tests.reference.opened import Floats, Parts, assembled, on_the_cpu

Build = Callable[[], tuple[GraphBuilder, tuple[Tensor, ...]]]
OPTIONS = on_the_cpu(QWEN35, max_ctx=1024)


@contextmanager
def forwards_of(options: EngineOptions) -> Iterator[tuple[Parts, Forwards]]:
    """Forwards over two slots."""
    with ExitStack() as stack:
        parts = stack.enter_context(assembled(options, n_slots=2))
        forwards = Forwards(parts.backend, parts.ledger, parts.model, parts.slots, chunk=64, host=None)
        stack.callback(forwards.close)
        yield parts, forwards


def alone(slot_id: int, n_prompt: int, n_tokens: int) -> list[Floats]:
    """Logits of a prompt and of tokens behind it, with nothing between."""
    with forwards_of(OPTIONS) as (parts, forwards):
        return list(steps(parts, forwards, slot_id, n_prompt, n_tokens))


def steps(parts: Parts, forwards: Forwards, slot_id: int, n_prompt: int, n_tokens: int) -> Iterator[Floats]:
    slot = parts.slots.slots[slot_id]
    ids = prompt(n_prompt, seed=slot_id)
    for start in range(0, n_prompt, 64):
        part = ids[start : start + 64]
        logits = forwards.prefill(slot, part, "last")
        assert logits is not None
        slot.commit(len(part))
        yield logits[0]
    for token in range(n_tokens):
        yield forwards.decode(slot, token).copy()
        slot.commit(1)


def test_graphs_that_lie_in_the_same_memory_do_not_disturb_each_other() -> None:
    """Prompts and decoding of two slots in turns, over several buckets, against each alone."""
    expected = [alone(0, 448, 12), alone(1, 250, 15)]
    with forwards_of(OPTIONS) as (parts, forwards):
        running = [steps(parts, forwards, 0, 448, 12), steps(parts, forwards, 1, 250, 15)]
        found: list[list[Floats]] = [[], []]
        for _ in range(19):
            for i in (0, 1):
                found[i] += [logits for logits in [next(running[i], None)] if logits is not None]
        assert len(forwards._cache.keys) >= 2
        assert forwards._cache.n_bytes == parts.ledger.by_label("CPU")["graphs"]
    for here, there in zip(found, expected, strict=True):
        np.testing.assert_array_equal(here, there)


def test_memory_is_as_large_as_the_largest_graph_needs_it() -> None:
    with forwards_of(OPTIONS) as (parts, forwards):
        largest = 0
        for logits in steps(parts, forwards, 0, 320, 4):
            assert logits.any()
            largest = max(largest, forwards._cache.n_bytes)
            assert forwards._cache.n_bytes == largest


def test_a_graph_is_built_once_while_the_memory_stays() -> None:
    with forwards_of(OPTIONS) as (parts, forwards):
        for _ in steps(parts, forwards, 0, 128, 20):
            pass
        assert forwards.built.n == 1
        for _ in steps(parts, forwards, 1, 64, 20):
            pass
        assert forwards.built.n == 2  # the other slot's; a short prompt does not move the memory


def test_the_least_recently_used_graph_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyggml_dflash.engine.graph_cache.KEPT_GRAPHS", 2)
    options = replace(OPTIONS, model=QWEN3)
    with forwards_of(options) as (parts, forwards):
        for slot_id in (0, 1, 0):
            for _ in steps(parts, forwards, slot_id, 64, 2):
                pass
        before = forwards._cache.keys
        slot = parts.slots.slots[0]
        slot.n_past = 300
        forwards.decode(slot, 1)
        assert len(before) == 2
        assert before[0] not in forwards._cache.keys
        assert before[1] in forwards._cache.keys


def chain(g: GraphBuilder, x: Tensor) -> Tensor:
    """128 x in seven operations; only the newest result is needed, so two addresses do."""
    for _ in range(7):
        x = g.add(x, x)
    return x


def tree(g: GraphBuilder, x: Tensor) -> Tensor:
    """2 x + 2 x + x ** 2 + x ** 2 in seven operations, the first four of them needed at once."""
    parts = [g.add(x, x), g.add(x, x), g.mul(x, x), g.mul(x, x)]
    return g.add(g.add(parts[0], parts[2]), g.add(parts[1], parts[3]))


@contextmanager
def squares(caps: dict[str, int]) -> Iterator[tuple[GraphCache, Callable[[int], Build]]]:
    """A cache, and what builds the squares of 0 to 3 as the last of a product of n x n."""
    with ExitStack() as stack:
        backend, ledger = Backend(choose_device("CPU"), threads=1), Ledger(caps=caps)
        stack.callback(backend.close)
        inputs = InputArena(backend, ledger, "inputs", {"x": (ElementType.F32, 4096)})
        stack.callback(inputs.close)
        inputs["x"].array[:4] = range(4)
        cache = GraphCache(backend, ledger, "test")
        stack.callback(cache.close)

        def build(n: int) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
            g = GraphBuilder(64)
            column = g.view(inputs["x"].tensor, (1, n), (4,), 0)
            return g, (g.output(g.mul_mat(column, column)),)

        yield cache, lambda n: lambda: build(n)


def diagonal(graph: StepGraph) -> list[float]:
    return [float(x) for x in np.diag(graph.run()[0])[:4]]


def test_kept_graphs_go_only_when_their_memory_does() -> None:
    caps: dict[str, int] = {}
    with squares(caps) as (cache, build):
        for n in (32, 16):
            assert diagonal(cache.get(n, build(n))) == [0, 1, 4, 9]
        assert cache.keys == (32, 16)
        small, held = cache.get(16, build(16)), cache.n_bytes
        caps["CPU"] = held + 2**15
        with pytest.raises(DeviceMemoryError, match="test"):
            cache.get(4096, build(4096))
        assert (cache.keys, cache.n_bytes) == ((32, 16), held)  # refused before anything moved
        assert cache.get(16, build(16)) is small
        assert diagonal(small) == [0, 1, 4, 9]
        caps.clear()
        assert diagonal(cache.get(64, build(64))) == [0, 1, 4, 9]
        assert cache.keys == (64,)
        assert cache.n_bytes > held


REFUSED = """
import resource
from pyggml_dflash.errors import DeviceMemoryError
from tests.engine.test_graph_cache import diagonal, squares
with squares({}) as (cache, build):
    print(diagonal(cache.get(16, build(16))))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, -1))
    try:
        cache.get(4096, build(4096))
    except DeviceMemoryError as error:
        print(type(error).__name__, cache.keys, cache.n_bytes)
    print(diagonal(cache.get(16, build(16))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_kept_graphs_go_with_memory_that_the_system_refuses_to_enlarge() -> None:
    done = program(REFUSED)
    squared = "[0.0, 1.0, 4.0, 9.0]\n"
    assert (done.returncode, done.stdout) == (0, f"{squared}DeviceMemoryError () 0\n{squared}"), done.stderr


def test_a_graph_with_as_many_nodes_gets_a_layout_of_its_own() -> None:
    """Its sizes fit the layout of the graph before, which would let results be written over."""
    with ExitStack() as stack:
        backend = Backend(choose_device("CPU"), threads=1)
        stack.callback(backend.close)
        inputs = InputArena(backend, Ledger(), "inputs", {"x": (ElementType.F32, 256)})
        stack.callback(inputs.close)
        values = inputs["x"].array
        values[:] = np.linspace(0.5, 1.5, 256)
        allocator = GraphAllocator(backend, Ledger(), "test")
        stack.callback(allocator.close)
        found = []
        for build in (chain, tree):
            g = GraphBuilder(64)
            out = g.output(build(g, inputs["x"].tensor))
            graph = StepGraph(backend, g, (out,), allocator)
            stack.callback(graph.close)
            found.append(graph.run()[0].copy().reshape(-1))
        np.testing.assert_allclose(found[0], 128 * values, rtol=1e-5)
        np.testing.assert_allclose(found[1], 4 * values + 2 * values**2, rtol=1e-5)
