"""Proposes tokens one after the other with the target's MTP block. Layer 6."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import Capture, GraphKey, MtpBlock, Step
from pyggml_dflash.engine.drafting import Proposal, SlotDrafter, distribution
from pyggml_dflash.engine.graph_cache import GraphCache, Relieve
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.inputs import bucketed
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.ggml.arena import TensorArena
from pyggml_dflash.ggml.arena import zero as zero_tensor
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import InputArena
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import builder_for
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.weights import LoadedWeights
from pyggml_dflash.plan.measure import Build, MemoryProbe, last_of_each_run
from pyggml_dflash.state.fingerprint import model_identity
from pyggml_dflash.state.strips import Part, row_part, state_parts

INJECT_ROWS: Final = 512


class MtpDrafter(SlotDrafter):
    """The block's cache and graphs, for one slot.

    `weights`: of the block and what it shares; None: the target's.
    """

    name = "mtp"

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        forwards: Forwards,
        block: MtpBlock,
        *,
        max_drafts: int,
        type_k: ElementType,
        type_v: ElementType,
        weights: LoadedWeights | None = None,
        relieve: Relieve | None = None,
    ) -> None:
        super().__init__(forwards)
        self._backend, self._ledger = backend, ledger
        self._weights = forwards.model.weights if weights is None else weights
        self.max_drafts = max_drafts
        self.capture = Capture(hidden=True)
        self._config, self._block = forwards.model.config, block
        config, n_cells = self._config, bucketed(forwards.n_ctx + max_drafts)
        state, extra = block.state(n_cells, type_k, type_v), block.extra_inputs(INJECT_ROWS, n_cells)
        self._n_cells, self._layout = n_cells, state
        with ExitStack() as stack:
            self._allocate(stack)
            embedded = forwards.gather is not None
            self._inputs = InputArena(
                backend,
                ledger,
                "inputs",
                {
                    "tokens": (ElementType.I32, INJECT_ROWS),
                    "rows": (ElementType.F32, INJECT_ROWS * config.n_embd if embedded else 1),
                    "positions": (ElementType.I32, INJECT_ROWS),
                    "cells": (ElementType.I64, INJECT_ROWS),
                    "mask": (ElementType.F16, n_cells),
                    **extra,
                },
            )
            self._extra = tuple(extra)
            stack.callback(self._inputs.close)
            self._cache = GraphCache(backend, ledger, "draft graphs", relieve=relieve, built=forwards.built)
            stack.callback(self._cache.close)
            self._stack = stack.pop_all()

    def _allocate(self, stack: ExitStack) -> None:
        """What is of one slot."""
        arena = TensorArena(self._backend, self._ledger, "draft cache", n_tensors=len(self._layout) + 1)
        stack.callback(arena.close)
        self._state = {t.name: arena.declare(t.name, t.type, *t.shape, 1) for t in self._layout}
        self._own = arena.declare("mtp.hidden", ElementType.F32, self._config.hidden_width, 1)
        arena.allocate(zero=True)

    def begin(self) -> None:
        """Forget the sequence before; a mask would not hide NaN that it left."""
        for x in self._state.values():
            zero_tensor(x, 0, min(x.shape[1], self._n_seen + self.max_drafts) * x.strides[1])
        hidden = self._forwards.record["hidden"]
        zero_tensor(hidden, self._first_row * hidden.strides[1], hidden.strides[1])
        self._n_seen = 0

    def observe(self, tokens: Sequence[int], n_past: int, row: int | None = None) -> None:
        """Put keys and values of committed pairs into the block's cache; keep the last hidden row.

        The hidden row in front of the first pair lies where the slot's own rows begin.
        """
        row = self._see(tokens, n_past, row)
        if row != self._first_row:
            self._carry(self._first_row, row)
        first = self._block.first_token if n_past == 0 else 0
        for start in range(first, len(tokens), INJECT_ROWS):
            n = min(INJECT_ROWS, len(tokens) - start)
            self._fill(tokens[start : start + n], n_past + start, self._inject_key(n))
            at = row + start
            self._cache.get(("inject", self._slot, at, n), partial(self._build_inject, at, n)).run()
        self._carry(row + len(tokens), self._first_row)

    def _carry(self, source: int, target: int) -> None:
        """Copy a hidden row to where it is looked for."""
        self._cache.get(("carry", source, target), lambda: self._build_carry(source, target)).run()

    def _inject_key(self, n: int) -> GraphKey:
        return GraphKey(n_tokens=n, n_kv=self._n_cells, slot=0, output="none")

    def _fill(self, tokens: Sequence[int], first: int, key: GraphKey) -> None:
        """Write the inputs of pairs whose tokens stand at positions from `first` on."""
        n, inputs, first = len(tokens), self._inputs, first - self._block.shift
        if self._forwards.gather is None:
            inputs["tokens"].array[:n] = tokens
            inputs["tokens"].upload(0, n)
        else:
            width = n * self._config.n_embd
            inputs["rows"].array[:width] = self._forwards.gather.gather(tokens).reshape(-1)
            inputs["rows"].upload(0, width)
        for name in ("positions", "cells"):
            inputs[name].array[:n] = range(first, first + n)
            inputs[name].upload(0, n)
        arrays = {name: inputs[name].array for name in self._extra}
        for name, size in self._block.fill_inputs(arrays, key, first, self._n_cells).items():
            inputs[name].upload(0, size)

    def _builder(self) -> GraphBuilder:
        model = self._forwards.model
        n_nodes = model.architecture.max_nodes(model.config) // model.config.n_layer + 256
        return builder_for(self._backend, n_nodes)

    def _rows(self, g: GraphBuilder, n: int) -> Tensor:
        if self._forwards.gather is None:
            tokens = g.view(self._inputs["tokens"].tensor, (n,), (), 0)
            return self._block.embed(g, self._weights, tokens)
        n_embd = self._config.n_embd
        return g.view(self._inputs["rows"].tensor, (n_embd, n), (4 * n_embd,), 0)

    def _recorded(self, g: GraphBuilder, start: int, n: int) -> Tensor:
        hidden = self._forwards.record["hidden"]
        return g.view(hidden, (hidden.shape[0], n), (hidden.strides[1],), start * hidden.strides[1])

    def _pairs(self, g: GraphBuilder, key: GraphKey) -> Step:
        inputs, n = self._inputs, key.n_tokens
        n_mask = key.n_kv if key.output == "all" else 1  # pairs that are only stored attend to nothing
        return Step(
            key=key,
            tokens=None,
            embeddings=self._rows(g, n),
            positions=g.view(inputs["positions"].tensor, (n,), (), 0),
            rows=g.view(inputs["cells"].tensor, (n,), (), 0),
            mask=g.view(inputs["mask"].tensor, (n_mask, 1), (2 * n_mask,), 0),
            flash_attn=self._forwards.model.flash_attn,
            extra={name: inputs[name].tensor for name in self._extra},
        )

    def _build_inject(self, start: int, n: int) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        g = self._builder()
        hidden = self._recorded(g, start, n)
        self._block.inject(g, self._weights, self._state, hidden, self._pairs(g, self._inject_key(n)))
        return g, ()

    def _build_carry(self, source: int, target: int) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        g = self._builder()
        g.expand(g.copy(self._recorded(g, source, 1), self._recorded(g, target, 1)))
        return g, ()

    def propose(self, anchor: int, n_past: int, n_drafts: int, sampler: Sampler | None) -> Proposal:
        """Run the block once per token, each on the state that the one before left."""
        drawn = sampler is not None and not sampler.greedy
        tokens: list[int] = []
        distributions: list[npt.NDArray[np.float64]] = []
        token = anchor
        for i in range(n_drafts):
            logits = self._step(token, n_past + i, own=i > 0)
            if drawn:
                assert sampler is not None
                q = distribution(logits, sampler)
                if q is None:
                    break
                distributions.append(q)
                token = sampler.draw(q)
            else:
                token = int(np.argmax(logits))
                if np.isnan(logits[token]):
                    break
            tokens.append(token)
        return Proposal(tuple(tokens), tuple(distributions) if drawn else None)

    def needs(self, probe: MemoryProbe) -> int:
        """Bytes of its largest graph of a whole context, without running one."""
        n_waiting, n_cells = self._forwards.space.shared.n_rows, self._n_cells
        rows = min(INJECT_ROWS, n_waiting)
        inject = probe.graph(("inject", rows), lambda: self._build_inject(0, rows)[0]).compute
        ends = last_of_each_run(lambda cell: self._step_key(cell).form, 0, n_cells)
        step = probe.largest(self._to_measure(self._step_key(cell)) for cell in ends)
        carry = probe.graph(("carry", n_waiting), lambda: self._build_carry(n_waiting, 0)[0]).compute
        return max(step, inject, carry)

    def _to_measure(self, key: GraphKey) -> tuple[Hashable, Build]:
        return ("step", key), lambda: self._build_step(key, True)[0]

    def _step_key(self, cell: int) -> GraphKey:
        n_kv = bucketed(cell + 1)
        return GraphKey(n_tokens=1, n_kv=n_kv, slot=0, output="all", form=self._block.form(cell, 1, n_kv))

    def _step(self, token: int, position: int, *, own: bool) -> npt.NDArray[Any]:
        block, mask = self._block, self._inputs["mask"]
        cell = position - block.shift
        key = self._step_key(cell)
        n_kv = key.n_kv
        self._fill((token,), position, key)
        first_cell = block.first_token - block.shift
        mask.array[:first_cell] = -np.inf
        mask.array[first_cell : cell + 1] = 0
        mask.array[cell + 1 : n_kv] = -np.inf
        mask.upload(0, n_kv)
        graph = self._cache.get(("step", self._slot, key, own), lambda: self._build_step(key, own))
        logits: npt.NDArray[Any] = graph.run()[0][0]
        return logits

    def _build_step(self, key: GraphKey, own: bool) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        g = self._builder()
        hidden = self._own if own else self._recorded(g, self._first_row, 1)
        logits, after = self._block.draft(g, self._weights, self._state, hidden, self._pairs(g, key))
        out = g.output(logits)
        g.expand(g.copy(after, self._own))
        return g, (out,)

    @cached_property
    def kind(self) -> str:
        """Names the file that the block comes from, and where its pairs stand. See `Companion`."""
        pairs = f"{self._block.first_token} {self._block.shift}"
        return f"mtp {pairs} {model_identity(self._weights.file).hex()}"

    def parts(self, n_past: int) -> tuple[Part, ...]:
        """What the pairs of `n_past` positions fill, drafts wrote some more; the hidden row behind it."""
        n_pairs, n_written = n_past - self._block.shift, self._n_seen + self.max_drafts
        cells = state_parts(self._layout, self._state, n_pairs, n_written)
        return *cells, row_part(self._forwards.record["hidden"], 1, 1, first=self._first_row)
