"""Milliseconds of one sparse attention layer by form, rows and context: which form pays where.

    python benchmarks/sparse_attention.py --context 4096 --context 16384 --rows 1 --rows 512

The layer has the sizes of the 125B model (or of a tiny one) and random weights; its cache is full of random
numbers. Each form runs the whole layer, projections included, over the same rows:

    dense     every row attends to everything before it
    masked    chosen cache rows through a mask over all of them
    gathered  copies of the chosen cache rows, some rows at a time
    indexer   scores and choice alone: what grows with the context in either form that chooses

Printed are median and range over the runs of one graph, after two that warm up. Forms take turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rates import Spread

from pyggml_dflash.arch.base import GraphKey, Step
from pyggml_dflash.arch.qwen4exp.indexer import (
    MAX_GATHERED,
    AttentionForm,
    IndexerConfig,
    Span,
    fill_index,
    index_inputs,
)
from pyggml_dflash.arch.qwen4exp.sparse import (
    IndexedKV,
    IndexStep,
    SparseLayer,
    index_state,
    max_sparse_nodes,
)
from pyggml_dflash.ggml.arena import TensorArena, write
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import can_run, check_supported
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig, RopeConfig
from pyggml_dflash.model.weights import BlockWeights

F32: Final = ElementType.F32
KINDS: Final = ("dense", "masked", "gathered", "indexer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a layer."""

    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rope_dims: int
    indexer: IndexerConfig

    def config(self) -> ModelConfig:
        """As a model of this layer alone."""
        return ModelConfig(
            architecture="qwen4exp",
            n_layer=1,
            n_mtp=0,
            n_embd=self.n_embd,
            n_head=self.n_head,
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim,
            n_ff=0,
            n_vocab=2,
            n_ctx_train=2**20,
            norm_eps=1e-6,
            attn_scale=self.head_dim**-0.5,
            rope=RopeConfig(n_dims=self.rope_dims, pairs="halves", freq_base=1e7),
            recurrent=(False,),
        )

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights, in ggml's order."""
        n, d, index = self.n_embd, self.head_dim, self.indexer
        return {
            "attn_q.weight": (n, 2 * d * self.n_head),
            "attn_k.weight": (n, d * self.n_head_kv),
            "attn_v.weight": (n, d * self.n_head_kv),
            "indexer.q_proj.weight": (n, index.head_dim * index.n_head),
            "indexer.k_proj.weight": (n, index.head_dim),
            "attn_q_norm.weight": (d,),
            "attn_k_norm.weight": (d,),
            "indexer.q_norm.weight": (index.head_dim,),
            "indexer.k_norm.weight": (index.head_dim,),
        }


SHAPES: Final = {
    "125b": Shape(
        n_embd=2560,
        n_head=24,
        n_head_kv=2,
        head_dim=256,
        rope_dims=64,
        indexer=IndexerConfig(n_head=4, head_dim=128, budget=2048, ratio=4),
    ),
    "tiny": Shape(
        n_embd=128,
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        rope_dims=32,
        indexer=IndexerConfig(n_head=4, head_dim=64, budget=512, ratio=4),
    ),
}


class Bench:
    """A layer on a device, and its graphs."""

    def __init__(
        self,
        stack: ExitStack,
        shape: Shape,
        backend: Backend,
        n_ctx: int,
        max_rows: int,
        type_kv: ElementType,
    ) -> None:
        self.shape, self.backend, self.n_ctx = shape, backend, n_ctx
        self.ledger, self.config = Ledger(), shape.config()
        arena = TensorArena(backend, self.ledger, "layer", n_tensors=16)
        stack.callback(arena.close)
        weight_type = {1: F32, 2: ElementType.F16}
        w = {n: arena.declare(n, weight_type[len(ne)], *ne) for n, ne in shape.weights().items()}
        state = {f"blk.0.{x}": arena.declare(x, type_kv, self.config.kv_dim, n_ctx, 1) for x in "kv"}
        for t in index_state(0, shape.indexer, n_ctx):
            state[t.name] = arena.declare(t.name, t.type, *t.shape, 1)
        arena.allocate()
        rng = np.random.default_rng(0)
        for tensor in (*w.values(), *state.values()):
            fill_random(tensor, rng)
        cache = IndexedKV.of(state, 0, self.config)
        self.layer = SparseLayer(
            config=self.config,
            indexer=shape.indexer,
            w=BlockWeights(w, ""),  # type: ignore[arg-type]
            cache=cache,
        )
        extra = index_inputs(shape.indexer, max_rows, n_ctx)
        own = {
            "x": (F32, shape.n_embd * max_rows),
            "positions": (ElementType.I32, max_rows),
            "rows": (ElementType.I64, max_rows),
            "mask": (ElementType.F16, max_rows * n_ctx),
        }
        self.inputs = InputArena(backend, self.ledger, "inputs", {**own, **extra})
        stack.callback(self.inputs.close)
        self.extra = {name: self.inputs[name].tensor for name in extra}
        self.inputs["x"].array[:] = rng.standard_normal(shape.n_embd * max_rows)
        self.inputs["x"].upload(0, shape.n_embd * max_rows)

    def fill(self, n: int, n_kv: int, form: AttentionForm) -> None:
        """The last `n` rows of `n_kv`."""
        n_past, inputs = n_kv - n, self.inputs
        span = Span(n_past=n_past, n_tokens=n, n_kv=n_kv, slot=0, n_ctx=self.n_ctx)
        sees = np.arange(n_kv) <= n_past + np.arange(n)[:, None]
        arrays: dict[str, Any] = {name: inputs[name].array for name in self.extra}
        counts = fill_index(arrays, self.shape.indexer, form, span)
        for name in ("positions", "rows"):
            inputs[name].array[:n] = range(n_past, n_kv)
            counts[name] = n
        inputs["mask"].array[: n * n_kv] = np.where(sees, 0, -np.inf).reshape(-1)
        counts["mask"] = n * n_kv
        for name, count in counts.items():
            inputs[name].upload(0, count)

    @contextmanager
    def graph(self, kind: str, n: int, n_kv: int) -> Iterator[Callable[[], float]]:
        """What runs one kind once and tells its seconds."""
        form: AttentionForm = kind if kind in ("dense", "masked", "gathered") else "masked"  # type: ignore[assignment]
        key, inputs = GraphKey(n_tokens=n, n_kv=n_kv, slot=0, output="all"), self.inputs
        builder = GraphBuilder(
            max_sparse_nodes(self.shape.indexer) + 64, lambda op: can_run(self.backend, op)
        )
        with ExitStack() as stack:
            stack.callback(builder.close)
            step = Step(
                key=key,
                tokens=None,
                embeddings=None,
                positions=builder.view(inputs["positions"].tensor, (n,), (), 0),
                rows=builder.view(inputs["rows"].tensor, (n,), (), 0),
                mask=builder.view(inputs["mask"].tensor, (n_kv, n), (2 * n_kv,), 0),
                flash_attn=True,
            )
            n_embd = self.shape.n_embd
            x = builder.view(inputs["x"].tensor, (n_embd, n), (4 * n_embd,), 0)
            index = IndexStep.of(builder, self.extra, self.shape.indexer, form, key)
            builder.expand(self._build(builder, kind, x, step, index))
            check_supported(self.backend, builder)
            allocator = GraphAllocator(self.backend, self.ledger, "graph")
            stack.callback(allocator.close)
            graph = StepGraph(self.backend, builder, (), allocator)

            def run() -> float:
                self.fill(n, n_kv, form)
                started = time.perf_counter()
                graph.run()
                return time.perf_counter() - started

            yield run

    def _build(self, g: GraphBuilder, kind: str, x: Tensor, step: Step, index: IndexStep) -> Tensor:
        if kind != "indexer":
            return self.layer.attention(g, x, step, index)
        self.layer.write_keys(g, x, 0, index)
        assert index.choice is not None
        return g.best_k(self.layer.scores(g, x, step, index.choice), self.shape.indexer.n_chosen)


def fill_random(tensor: Tensor, rng: np.random.Generator) -> None:
    """Small random numbers, a few million of them over and over."""
    values = rng.standard_normal(min(tensor.n_elements, 2**22)).astype(np.float32) * 0.05
    values = values if tensor.type == F32 else values.astype(np.float16)
    flat, size = values.view(np.uint8), values.nbytes
    for start in range(0, tensor.n_bytes, size):
        write(tensor, flat[: min(size, tensor.n_bytes - start)], start)


def measure(bench: Bench, n: int, n_kv: int, n_runs: int) -> dict[str, Spread]:
    """Milliseconds of every kind that `n` rows can have."""
    kinds = list(KINDS)
    if n > MAX_GATHERED:
        kinds.remove("gathered")
    if n_kv <= bench.shape.indexer.dense_limit + n:
        kinds = ["dense"]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        graphs = {kind: stack.enter_context(bench.graph(kind, n, n_kv)) for kind in kinds}
        for run in range(n_runs + 2):
            for kind, graph in graphs.items():
                took = graph()
                if run >= 2:
                    found[kind].append(1e3 * took)
    return {kind: Spread.of(values) for kind, values in found.items()}


@click.command()
@click.option("--shape", "name", type=click.Choice(sorted(SHAPES)), default="125b", show_default=True)
@click.option("--device", default="CPU", show_default=True, help="A device of `dflash devices`.")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--context", "contexts", type=int, multiple=True, default=(4096, 16384), show_default=True)
@click.option("--rows", "rows", type=int, multiple=True, default=(1, 4, 8, 256), show_default=True)
@click.option("--kv", type=click.Choice(["f16", "f32"]), default="f16", show_default=True)
@click.option("--runs", "n_runs", default=7, show_default=True, help="Runs that count.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    name: str, device: str, threads: int, contexts: tuple[int, ...], rows: tuple[int, ...], kv: str,
    n_runs: int, as_json: bool,
) -> None:  # fmt: skip
    """Measure one sparse attention layer; contexts are multiples of 256 cache rows."""
    type_kv = F32 if kv == "f32" else ElementType.F16
    results = []
    with ExitStack() as stack:
        backend = Backend(choose_device(device), threads=threads)
        stack.callback(backend.close)
        bench = Bench(stack, SHAPES[name], backend, max(contexts), max(rows), type_kv)
        for n_kv in contexts:
            for n in rows:
                spreads = measure(bench, n, n_kv, n_runs)
                results.append({"n_kv": n_kv, "rows": n, "ms": {k: asdict(s) for k, s in spreads.items()}})
                if not as_json:
                    figures = "  ".join(f"{kind} {spread}" for kind, spread in spreads.items())
                    print(f"{n_kv:7} cache rows, {n:4} rows: {figures} ms", flush=True)
    if as_json:
        print(json.dumps({"shape": name, "device": device, "kv": kv, "runs": n_runs, "results": results}))


if __name__ == "__main__":
    main()
