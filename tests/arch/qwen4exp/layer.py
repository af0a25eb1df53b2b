"""One sparse attention layer with random weights and its cache, run forward by forward on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.arch.base import GraphKey, Step
from pyggml_dflash.arch.qwen4exp.indexer import (
    AttentionForm,
    IndexerConfig,
    Span,
    attention_form,
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
from pyggml_dflash.ggml.ffi import c_string, lib
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder, Supports
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig, RopeConfig
from pyggml_dflash.model.weights import BlockWeights
from tests.reference.sparse import Sizes

Floats = NDArray[np.float32]
F32 = ElementType.F32
BUCKET = 256  # cache rows that graphs are built for, as in the engine


def random_weights(sizes: Sizes, seed: int = 0) -> dict[str, Floats]:
    """Matrices [out, in] and vectors by their names in a block of a file."""
    rng, n, d = np.random.default_rng(seed), sizes.n_embd, sizes.head_dim
    outs = {
        "attn_q": 2 * d * sizes.n_head,
        "attn_k": d * sizes.n_head_kv,
        "attn_v": d * sizes.n_head_kv,
        "indexer.q_proj": sizes.index_dim * sizes.index_heads,
        "indexer.k_proj": sizes.index_dim,
    }
    norms = {"attn_q_norm": d, "attn_k_norm": d, "indexer.q_norm": sizes.index_dim}
    norms["indexer.k_norm"] = sizes.index_dim
    found = {name: rng.normal(0, 1.5 / np.sqrt(n), (out, n)) for name, out in outs.items()}
    found |= {name: rng.normal(1, 0.3, size) for name, size in norms.items()}
    return {f"{name}.weight": value.astype(np.float32) for name, value in found.items()}


def random_rows(sizes: Sizes, n: int, seed: int = 1) -> Floats:
    """What a layer is fed with: [n, n_embd]."""
    return np.random.default_rng(seed).normal(0, 1, (n, sizes.n_embd)).astype(np.float32)


def model_config(sizes: Sizes) -> ModelConfig:
    """A model of this one layer."""
    return ModelConfig(
        architecture="qwen4exp",
        n_layer=1,
        n_mtp=0,
        n_embd=sizes.n_embd,
        n_head=sizes.n_head,
        n_head_kv=sizes.n_head_kv,
        head_dim=sizes.head_dim,
        n_ff=0,
        n_vocab=2,
        n_ctx_train=4096,
        norm_eps=sizes.eps,
        attn_scale=sizes.head_dim**-0.5,
        rope=RopeConfig(n_dims=sizes.rope_dims, pairs="halves", freq_base=sizes.freq_base),
        recurrent=(False,),
    )


@dataclass(frozen=True, slots=True)
class Ran:
    """Per row of one forward: outputs [row, head_dim * head]; unless it is dense, scores and choice."""

    form: AttentionForm
    outputs: Floats
    scores: Floats | None
    chosen: NDArray[np.int32] | None


class Layer:
    """A layer and its cache, which begins full of what others left there."""

    def __init__(
        self,
        stack: ExitStack,
        sizes: Sizes,
        weights: dict[str, Floats],
        *,
        n_ctx: int = 512,
        n_slots: int = 2,
        type_kv: ElementType = F32,
        flash_attn: bool = True,
        supports: Supports | None = None,
        threads: int = 1,
    ) -> None:
        self.sizes, self.n_ctx, self.flash_attn, self._supports = sizes, n_ctx, flash_attn, supports
        self.indexer = IndexerConfig(
            n_head=sizes.index_heads, head_dim=sizes.index_dim, budget=sizes.budget, ratio=sizes.ratio
        )
        self.config = model_config(sizes)
        self.cpu = Backend(choose_device("CPU"), threads=threads)
        stack.callback(self.cpu.close)
        self._ledger = Ledger()
        self._arena = TensorArena(self.cpu, self._ledger, "layer", n_tensors=32)
        stack.callback(self._arena.close)
        tensors = {name: self._declare(name, F32, *value.shape[::-1]) for name, value in weights.items()}
        kv = (self.config.kv_dim, n_ctx, n_slots)
        state = {f"blk.0.{x}": self._declare(f"blk.0.{x}", type_kv, *kv) for x in "kv"}
        for t in index_state(0, self.indexer, n_ctx):
            state[t.name] = self._declare(t.name, t.type, *t.shape, n_slots)
        self._arena.allocate()
        for name, value in weights.items():
            write(tensors[name], value)
        self.state = state
        self.fill_state(7)
        self.layer = SparseLayer(
            config=self.config,
            indexer=self.indexer,
            w=BlockWeights(tensors, ""),  # type: ignore[arg-type]
            cache=IndexedKV.of(state, 0, self.config),
        )
        self._allocator = GraphAllocator(self.cpu, self._ledger, "graph")
        stack.callback(self._allocator.close)
        sizes_of_inputs = {
            "x": (F32, sizes.n_embd * n_ctx),
            "positions": (ElementType.I32, n_ctx),
            "rows": (ElementType.I64, n_ctx),
            "mask": (ElementType.F16, n_ctx * n_ctx),
            **index_inputs(self.indexer, n_ctx, n_ctx),
        }
        self.inputs = InputArena(self.cpu, self._ledger, "inputs", sizes_of_inputs)
        stack.callback(self.inputs.close)
        self._extra = {name: self.inputs[name].tensor for name in index_inputs(self.indexer, 1, n_ctx)}

    def _declare(self, name: str, type: ElementType, *shape: int) -> Tensor:
        return self._arena.declare(name, type, *shape)

    def fill_state(self, seed: int) -> None:
        """Overwrite every tensor of the cache with numbers."""
        rng = np.random.default_rng(seed)
        for tensor in self.state.values():
            values = rng.normal(0, 3, tensor.n_elements).astype(np.float32)
            if tensor.type == ElementType.F16:
                write(tensor, values.astype(np.float16))
            elif tensor.type == F32:
                write(tensor, values)
            else:
                write(tensor, np.zeros(tensor.n_bytes, np.uint8))

    def run(
        self, x: Floats, n_past: int, *, slot: int = 1, form: AttentionForm | None = None, n_kv: int = 0
    ) -> Ran:
        """One forward of rows x behind `n_past`; its form and cache rows are the engine's unless given."""
        n = len(x)
        n_kv = n_kv or -(-(n_past + n) // BUCKET) * BUCKET
        form = form or attention_form(self.indexer, n_past=n_past, n_tokens=n, n_kv=n_kv, host=True)
        self._fill(x, n_past, n_kv, slot, form)
        g = GraphBuilder(max_sparse_nodes(self.indexer) + 32, self._supports)  # and what tests read
        try:
            outputs, seen = self._build(g, n, n_kv, slot, form)
            arrays = StepGraph(self.cpu, g, (outputs, *seen), self._allocator).run()
            copies = [array.copy() for array in arrays]
        finally:
            g.close()
        if not seen:
            return Ran(form, copies[0], None, None)
        return Ran(form, copies[0], copies[1], copies[2])

    def run_all(self, x: Floats, chunk: int, *, slot: int = 1, n_past: int = 0, n_kv: int = 0) -> list[Ran]:
        """Rows x in forwards of `chunk` rows."""
        starts = range(0, len(x), chunk)
        return [self.run(x[i : i + chunk], n_past + i, slot=slot, n_kv=n_kv) for i in starts]

    def _fill(self, x: Floats, n_past: int, n_kv: int, slot: int, form: AttentionForm) -> None:
        n, inputs, first = len(x), self.inputs, self.sizes.first_position
        inputs["x"].array[: x.size] = x.reshape(-1)
        inputs["positions"].array[:n] = range(first + n_past, first + n_past + n)
        inputs["rows"].array[:n] = slot * self.n_ctx + n_past + np.arange(n)
        sees = np.arange(n_kv) <= n_past + np.arange(n)[:, None]
        inputs["mask"].array[: n * n_kv] = np.where(sees, 0, -np.inf).reshape(-1)
        span = Span(n_past=n_past, n_tokens=n, n_kv=n_kv, slot=slot, n_ctx=self.n_ctx, first_position=first)
        arrays: dict[str, Any] = {name: inputs[name].array for name in self._extra}
        for name in arrays:
            arrays[name][:] = 0 if arrays[name].dtype.kind == "f" else 10**6  # what is not written is seen
        fill_index(arrays, self.indexer, form, span)

    def _build(
        self, g: GraphBuilder, n: int, n_kv: int, slot: int, form: AttentionForm
    ) -> tuple[Tensor, list[Tensor]]:
        key, shown = GraphKey(n_tokens=n, n_kv=n_kv, slot=slot, output="all"), {}
        inputs, n_embd = self.inputs, self.sizes.n_embd
        step = Step(
            key=key,
            tokens=None,
            embeddings=None,
            positions=g.view(inputs["positions"].tensor, (n,), (), 0),
            rows=g.view(inputs["rows"].tensor, (n,), (), 0),
            mask=g.view(inputs["mask"].tensor, (n_kv, n), (2 * n_kv,), 0),
            flash_attn=self.flash_attn,
            tap=shown.__setitem__,
        )
        x = g.view(inputs["x"].tensor, (n_embd, n), (4 * n_embd,), 0)
        index = IndexStep.of(g, self._extra, self.indexer, form, key)
        outputs = g.output(self.layer.attention(g, x, step, index))
        if form == "dense":
            return outputs, []
        chosen = g.cont(shown["index_chosen"])
        return outputs, [g.output(shown["index_scores"]), g.output(chosen)]


@contextmanager
def open_layer(sizes: Sizes, weights: dict[str, Floats] | None = None, **options: Any) -> Iterator[Layer]:
    """A layer with random weights unless given; `options` are those of `Layer`."""
    with ExitStack() as stack:
        yield Layer(stack, sizes, random_weights(sizes) if weights is None else weights, **options)


def without(name: str) -> Supports:
    """A device that can do everything but the operation called `name`."""
    return lambda op: c_string(lib.ggml_op_name(op.ptr.op)) != name
