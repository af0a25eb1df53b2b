"""Forwards of one model: builds graphs, keeps those that come again, feeds and runs them. Layer 6.

A prefill graph is built for each chunk, since a chunk takes far longer than its build; all of them
share one allocator. Decode graphs are kept: the topology has no `n_past`, only the number of cache
rows rounded up to a bucket, so a decode step writes four small inputs and runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import Architecture, GraphKey, OutputKind, Step, Tap
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import can_run, check_supported
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import EMBEDDING, LoadedWeights
from pyggml_dflash.state.slot import Slot, SlotTable

BUCKET: Final = 256  # cache rows; GPU attention kernels want multiples of it
KEPT_DECODE_GRAPHS: Final = 2  # per slot: the bucket in use and the one before

Logits = npt.NDArray[np.float32]


def bucketed(n: int) -> int:
    """`n` rounded up to a whole number of buckets."""
    return -(-n // BUCKET) * BUCKET


@dataclass(frozen=True, slots=True)
class Model:
    """What a forward is built from."""

    architecture: Architecture
    config: ModelConfig
    weights: LoadedWeights
    flash_attn: bool


class RowGather:
    """Reads rows of an embedding table that stays in the mapped file, on the CPU."""

    def __init__(self, host: Backend, ledger: Ledger, weights: LoadedWeights, max_rows: int) -> None:
        self._host, self._table = host, weights[EMBEDDING]
        with ExitStack() as stack:
            self._ids = InputArena(host, ledger, "inputs", {"ids": (ElementType.I32, max_rows)})
            stack.callback(self._ids.close)
            self._allocator = GraphAllocator(host, ledger, "embedding rows")
            stack.callback(self._allocator.close)
            self._stack = stack.pop_all()
        self._n_rows = 0
        self._graph: StepGraph | None = None

    def gather(self, tokens: Sequence[int]) -> npt.NDArray[Any]:
        """F32 [n_tokens, n_embd]; overwritten by the next call."""
        if len(tokens) != self._n_rows:
            self._build(len(tokens))
        self._ids["ids"].array[: len(tokens)] = tokens
        assert self._graph is not None
        return self._graph.run()[0]

    def _build(self, n_rows: int) -> None:
        if self._graph is not None:
            self._graph.close()
            self._graph, self._n_rows = None, 0
        g = GraphBuilder(64)
        rows = g.output(g.get_rows(self._table, g.view(self._ids["ids"].tensor, (n_rows,), (), 0)))
        self._graph, self._n_rows = StepGraph(self._host, g, (rows,), self._allocator), n_rows

    def close(self) -> None:
        """Free graph and inputs."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._stack.close()


class Inputs:
    """The inputs of forwards of up to `max_rows` rows, and how they are filled."""

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        config: ModelConfig,
        *,
        max_rows: int,
        max_kv: int,
        embedded: bool,
    ) -> None:
        n_first = max_rows * config.n_embd if embedded else max_rows
        self._arena = InputArena(
            backend,
            ledger,
            "inputs",
            {
                "x": (ElementType.F32 if embedded else ElementType.I32, n_first),
                "positions": (ElementType.I32, max_rows),
                "rows": (ElementType.I64, max_rows),
                "mask": (ElementType.F16, max_rows * max_kv),
            },
        )
        self.x, self.positions = self._arena["x"], self._arena["positions"]
        self.rows, self.mask = self._arena["rows"], self._arena["mask"]
        self.mask.array[:] = -np.inf
        self._triangle = np.triu(np.full((max_rows, max_rows), -np.inf, np.float16), 1)
        self._n_embd, self._embedded = config.n_embd, embedded
        self._shown: tuple[int, int] | None = None  # slot and n_past that a one-row mask shows

    def step(self, g: GraphBuilder, key: GraphKey, flash_attn: bool, tap: Tap | None) -> Step:
        """The input tensors as a graph of this key sees them."""
        n, x = key.n_tokens, self.x.tensor
        row = 4 * self._n_embd
        return Step(
            key=key,
            tokens=None if self._embedded else g.view(x, (n,), (), 0),
            embeddings=g.view(x, (self._n_embd, n), (row,), 0) if self._embedded else None,
            positions=g.view(self.positions.tensor, (n,), (), 0),
            rows=g.view(self.rows.tensor, (n,), (), 0),
            mask=g.view(self.mask.tensor, (key.n_kv, n), (2 * key.n_kv,), 0),
            flash_attn=flash_attn,
            tap=tap,
        )

    def fill(self, x: npt.ArrayLike, n: int, slot: int, n_past: int, n_ctx: int) -> None:
        """Write tokens or embedding rows, positions and cache rows of `n` rows after `n_past`."""
        width = n * self._n_embd if self._embedded else n
        self.x.array[:width] = x
        self.positions.array[:n] = range(n_past, n_past + n)
        first = slot * n_ctx + n_past
        self.rows.array[:n] = range(first, first + n)
        self.x.upload(0, width)
        self.positions.upload(0, n)
        self.rows.upload(0, n)

    def fill_one(self, x: npt.ArrayLike, slot: int, n_past: int, n_ctx: int) -> None:
        """`fill` and the mask for a single row, which changes in one element from step to step."""
        mask = self.mask.array
        if self._embedded:
            self.x.array[: self._n_embd] = x
            self.x.upload(0, self._n_embd)
        else:
            self.x.array[0] = x
            self.x.upload(0, 1)
        self.positions.array[0] = n_past
        self.rows.array[0] = slot * n_ctx + n_past
        self.positions.upload(0, 1)
        self.rows.upload(0, 1)
        if self._shown == (slot, n_past - 1):
            mask[n_past] = 0
            self.mask.upload(n_past, n_past + 1)
        else:
            mask[: n_past + 1] = 0
            mask[n_past + 1 :] = -np.inf
            self.mask.upload(0, len(mask))
        self._shown = slot, n_past

    def fill_mask(self, n: int, n_past: int, n_kv: int) -> None:
        """Row i sees cache rows up to n_past + i."""
        mask = self.mask.array[: n * n_kv].reshape(n, n_kv)
        mask[:, :n_past] = 0
        mask[:, n_past : n_past + n] = self._triangle[:n, :n]
        mask[:, n_past + n :] = -np.inf
        self.mask.upload(0, n * n_kv)

    def close(self) -> None:
        """Free the tensors."""
        self._arena.close()


class Forwards:
    """Runs forwards over a table of slots. Never moves `n_past`: the caller commits."""

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        model: Model,
        slots: SlotTable,
        *,
        chunk: int,
        host: Backend | None,
    ) -> None:
        """`host`: a CPU backend to gather embedding rows on when `backend` is no host device."""
        self._backend, self._ledger, self.model, self._slots = backend, ledger, model, slots
        self.n_ctx, self.chunk = slots.layout.n_ctx, chunk
        config, embedded = model.config, host is not None
        self._decode: OrderedDict[GraphKey, tuple[StepGraph, GraphAllocator]] = OrderedDict()
        with ExitStack() as stack:
            self._gather = None
            if host is not None:
                self._gather = RowGather(host, ledger, model.weights, chunk)
                stack.callback(self._gather.close)
            self._one = Inputs(backend, ledger, config, max_rows=1, max_kv=self.n_ctx, embedded=embedded)
            stack.callback(self._one.close)
            self._many = Inputs(backend, ledger, config, max_rows=chunk, max_kv=self.n_ctx, embedded=embedded)
            stack.callback(self._many.close)
            self._prefill = GraphAllocator(backend, ledger, "prefill graph")
            stack.callback(self._prefill.close)
            stack.callback(self._close_decode)
            self._stack = stack.pop_all()

    def prefill(self, slot: Slot, tokens: Sequence[int], output: OutputKind) -> Logits | None:
        """Run up to `chunk` prompt tokens behind what the slot has.

        Returns logits F32 [rows, n_vocab] of the last row or of all, or None for output 'none'. The
        array is a copy.
        """
        n, n_past = len(tokens), slot.n_past
        key = GraphKey(n_tokens=n, n_kv=bucketed(n_past + n), slot=slot.id, output=output)
        x = tokens if self._gather is None else self._gather.gather(tokens).reshape(-1)
        self._many.fill(x, n, slot.id, n_past, self.n_ctx)
        self._many.fill_mask(n, n_past, key.n_kv)
        graph = self._build(key, self._many, self._prefill)
        try:
            results = graph.run()
            return None if output == "none" else np.array(results[0], np.float32)
        finally:
            graph.close()

    def decode(self, slot: Slot, token: int) -> Logits:
        """Run one token behind what the slot has: logits F32 [n_vocab], overwritten by the next call."""
        n_past = slot.n_past
        n_kv = (n_past // BUCKET + 1) * BUCKET
        kept = self._decode.get(GraphKey(n_tokens=1, n_kv=n_kv, slot=slot.id, output="last"))
        graph = self._keep_decode(slot.id, n_kv) if kept is None else kept[0]
        x = token if self._gather is None else self._gather.gather((token,))[0]
        self._one.fill_one(x, slot.id, n_past, self.n_ctx)
        logits: Logits = graph.run()[0][0]
        return logits

    def _keep_decode(self, slot: int, n_kv: int) -> StepGraph:
        key = GraphKey(n_tokens=1, n_kv=n_kv, slot=slot, output="last")
        while len(self._decode) >= KEPT_DECODE_GRAPHS * len(self._slots.slots):
            _, (old, memory) = self._decode.popitem(last=False)
            old.close()
            memory.close()
        allocator = GraphAllocator(self._backend, self._ledger, "decode graphs")
        try:
            graph = self._build(key, self._one, allocator)
        except BaseException:
            allocator.close()
            raise
        self._decode[key] = graph, allocator
        return graph

    def _build(self, key: GraphKey, inputs: Inputs, allocator: GraphAllocator) -> StepGraph:
        builder, outputs = build_forward(self._backend, self.model, self._slots.tensors, inputs, key)
        try:
            check_supported(self._backend, builder)
            return StepGraph(self._backend, builder, outputs, allocator)
        except BaseException:
            builder.close()
            raise

    def _close_decode(self) -> None:
        for graph, allocator in self._decode.values():
            graph.close()
            allocator.close()
        self._decode.clear()

    def close(self) -> None:
        """Free graphs, their memory and inputs."""
        self._stack.close()


def build_forward(
    backend: Backend,
    model: Model,
    state: dict[str, Tensor],
    inputs: Inputs,
    key: GraphKey,
    tap: Tap | None = None,
) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
    """A forward as a graph without memory, and what to read from it: the logits, if the key asks."""
    max_nodes = model.architecture.max_nodes(model.config) + 64
    builder = GraphBuilder(max_nodes, lambda op: can_run(backend, op))
    try:
        step = inputs.step(builder, key, model.flash_attn, tap)
        logits = model.architecture.build(builder, model.config, model.weights, state, step)
        if logits is None:
            return builder, ()
        return builder, (builder.output(logits),)
    except BaseException:
        builder.close()
        raise
