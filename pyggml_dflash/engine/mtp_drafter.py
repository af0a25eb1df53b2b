"""Proposes tokens one after the other with the target's own MTP block. Layer 6."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import Capture
from pyggml_dflash.arch.blocks import KVView
from pyggml_dflash.arch.mtp import build_mtp_inject, build_mtp_step, mtp_config, mtp_embed, mtp_step
from pyggml_dflash.engine.drafting import Proposal
from pyggml_dflash.engine.graph_cache import GraphCache, GraphNeeds, Relieve
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
from pyggml_dflash.ggml.placement import can_run
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.plan.measure import MemoryProbe

INJECT_ROWS: Final = 512
KEPT_STEPS: Final = 4  # of either kind, in this bucket of cache rows and the one before


class MtpDrafter:
    """The block's cache and graphs; its weights are loaded with the target's."""

    name = "mtp"

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        forwards: Forwards,
        *,
        max_drafts: int,
        type_k: ElementType,
        type_v: ElementType,
        kept_bytes: int | None = None,
        relieve: Relieve | None = None,
    ) -> None:
        self._backend, self._forwards, self.max_drafts = backend, forwards, max_drafts
        self.capture = Capture(hidden=True)
        self._config = forwards.model.config
        self._block = mtp_config(self._config)
        config, n_cells = self._config, bucketed(forwards.n_ctx + max_drafts)
        with ExitStack() as stack:
            arena = TensorArena(backend, ledger, "draft cache", n_tensors=3)
            stack.callback(arena.close)
            p = f"blk.{config.n_layer}."
            self._state = {
                f"{p}k": arena.declare(f"{p}k", type_k, config.kv_dim, n_cells, 1),
                f"{p}v": arena.declare(f"{p}v", type_v, config.kv_dim, n_cells, 1),
            }
            self._own = arena.declare("mtp.hidden", ElementType.F32, config.n_embd, 1)
            arena.allocate(zero=True)
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
                },
            )
            stack.callback(self._inputs.close)
            self._cache = GraphCache(backend, ledger, "draft graphs", max_bytes=kept_bytes, relieve=relieve)
            stack.callback(self._cache.close)
            self._stack = stack.pop_all()
        self._n_seen = 0

    def begin(self) -> None:
        """Forget the sequence before."""
        self._n_seen = 0
        zero_tensor(self._forwards.record["hidden"])

    def observe(self, tokens: Sequence[int], n_past: int) -> None:
        """Put keys and values of committed pairs into the block's cache; keep the last hidden row."""
        assert n_past == self._n_seen, "a gap in what the draft has seen"
        first = 1 if n_past == 0 else 0  # the first token has no state before it
        for start in range(first, len(tokens), INJECT_ROWS):
            n = min(INJECT_ROWS, len(tokens) - start)
            self._fill(tokens[start : start + n], n_past + start)
            self._cache.get(("inject", start, n), partial(self._build_inject, start, n)).run()
        n = len(tokens)
        self._cache.get(("carry", n), lambda: self._build_carry(n)).run()
        self._n_seen += n

    def _fill(self, tokens: Sequence[int], first: int) -> None:
        n, inputs = len(tokens), self._inputs
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

    def _builder(self) -> GraphBuilder:
        return GraphBuilder(512, lambda op: can_run(self._backend, op))

    def _rows(self, g: GraphBuilder, n: int) -> Tensor:
        if self._forwards.gather is None:
            tokens = g.view(self._inputs["tokens"].tensor, (n,), (), 0)
            return mtp_embed(g, self._config, self._forwards.model.weights, tokens)
        n_embd = self._config.n_embd
        return g.view(self._inputs["rows"].tensor, (n_embd, n), (4 * n_embd,), 0)

    def _recorded(self, g: GraphBuilder, start: int, n: int) -> Tensor:
        hidden = self._forwards.record["hidden"]
        return g.view(hidden, (hidden.shape[0], n), (hidden.strides[1],), start * hidden.strides[1])

    def _positions(self, g: GraphBuilder, n: int) -> tuple[Tensor, Tensor]:
        views = (g.view(self._inputs[name].tensor, (n,), (), 0) for name in ("positions", "cells"))
        return next(views), next(views)

    def _build_inject(self, start: int, n: int) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        g = self._builder()
        positions, cells = self._positions(g, n)
        cache = KVView.of(self._state, self._config.n_layer, self._block)
        weights, hidden = self._forwards.model.weights, self._recorded(g, start, n)
        build_mtp_inject(g, self._config, weights, cache, self._rows(g, n), hidden, positions, cells)
        return g, ()

    def _build_carry(self, n: int) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        g = self._builder()
        g.expand(g.copy(self._recorded(g, n, 1), self._recorded(g, 0, 1)))
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
                distributions.append(sampler.probabilities(logits))
                token = sampler.draw(distributions[-1])
            else:
                token = int(np.argmax(logits))
            tokens.append(token)
        return Proposal(tuple(tokens), tuple(distributions) if drawn else None)

    def needs(self, probe: MemoryProbe) -> GraphNeeds:
        """What its graphs take at the end of the context, without running one."""
        n_hidden, n_cells = self._forwards.record["hidden"].shape[1], self._inputs["mask"].tensor.shape[0]
        rows = min(INJECT_ROWS, n_hidden - 1)
        inject = probe.graph(("inject", rows), lambda: self._build_inject(0, rows)[0]).compute
        step = probe.graph(("step", n_cells), lambda: self._build_step(n_cells, True)[0]).compute
        n_inject = 1 + -(-n_hidden // INJECT_ROWS)
        return GraphNeeds(kept=KEPT_STEPS * step + n_inject * inject)

    def _step(self, token: int, position: int, *, own: bool) -> npt.NDArray[Any]:
        n_kv = bucketed(position + 1)
        self._fill((token,), position)
        mask = self._inputs["mask"]
        mask.array[0] = -np.inf
        mask.array[1 : position + 1] = 0
        mask.array[position + 1 : n_kv] = -np.inf
        mask.upload(0, n_kv)
        graph = self._cache.get(("step", n_kv, own), lambda: self._build_step(n_kv, own))
        logits: npt.NDArray[Any] = graph.run()[0][0]
        return logits

    def _build_step(self, n_kv: int, own: bool) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        g = self._builder()
        positions, cells = self._positions(g, 1)
        mask = g.view(self._inputs["mask"].tensor, (n_kv, 1), (2 * n_kv,), 0)
        step = mtp_step(g, 1, n_kv, positions, cells, mask, self._forwards.model.flash_attn)
        hidden = self._own if own else self._recorded(g, 0, 1)
        weights = self._forwards.model.weights
        logits, after = build_mtp_step(g, self._config, weights, self._state, self._rows(g, 1), hidden, step)
        out = g.output(logits)
        g.expand(g.copy(after, self._own))
        return g, (out,)

    def close(self) -> None:
        """Free cache, inputs and graphs."""
        self._stack.close()
