"""Proposes a block of tokens with a DFlash draft. Layer 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import Capture
from pyggml_dflash.arch.dflash import (
    BlockInputs,
    DraftCache,
    build_block,
    build_candidates,
    build_inject,
    build_logits,
    cache_type,
    max_nodes,
)
from pyggml_dflash.arch.dflash_config import DraftConfig
from pyggml_dflash.engine.drafting import Proposal, SlotDrafter, distribution, ring_mask
from pyggml_dflash.engine.graph_cache import GraphCache, Relieve
from pyggml_dflash.engine.graphs import Forwards
from pyggml_dflash.engine.inputs import bucketed
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.ggml.arena import TensorArena
from pyggml_dflash.ggml.arena import zero as zero_tensor
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import builder_for
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.weights import EMBEDDING, HEAD, LoadedWeights
from pyggml_dflash.plan.measure import MemoryProbe
from pyggml_dflash.state.fingerprint import model_identity
from pyggml_dflash.state.strips import Part, row_part

INJECT_ROWS: Final = 256  # committed rows taken in with one graph; no ring is smaller


@dataclass(frozen=True, slots=True)
class Ring:
    """Layers that share a cache size: `n_cells` cells, a window (0: none) and causality."""

    n_cells: int
    window: int
    causal: bool


class DFlashDrafter(SlotDrafter):
    """One draft beside its target, for one slot; reads what `forwards` recorded."""

    name = "dflash"

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        config: DraftConfig,
        weights: LoadedWeights,
        forwards: Forwards,
        type_k: ElementType,
        type_v: ElementType,
        *,
        relieve: Relieve | None = None,
    ) -> None:
        super().__init__(forwards)
        self.config, self._weights = config, weights
        self._backend, self._ledger = backend, ledger
        self._types = cache_type(type_k, config), cache_type(type_v, config)
        self.capture = Capture(layers=config.target_layers)
        self.max_drafts = config.block_size - 1
        block, n_ctx = config.block_size, forwards.n_ctx
        whole = bucketed(n_ctx + block)
        self._rings = [
            Ring(min(whole, bucketed(window + block)) if window else whole, window, causal)
            for window, causal in zip(config.windows, config.causal, strict=True)
        ]
        self._kinds = sorted(set(self._rings), key=lambda ring: (ring.n_cells, ring.window, ring.causal))
        with ExitStack() as stack:
            self._allocate(stack)
            self._inputs = InputArena(backend, ledger, "inputs", self._input_sizes())
            stack.callback(self._inputs.close)
            self._cache = GraphCache(backend, ledger, "draft graphs", relieve=relieve, built=forwards.built)
            stack.callback(self._cache.close)
            self._stack = stack.pop_all()

    def _allocate(self, stack: ExitStack) -> None:
        """What is of one slot."""
        arena = TensorArena(self._backend, self._ledger, "draft cache", n_tensors=2 * self.config.n_layer)
        stack.callback(arena.close)
        self._caches = [
            DraftCache(
                *(
                    arena.declare(f"draft.{i}.{name}", type, self.config.kv_dim, ring.n_cells)
                    for name, type in zip("kv", self._types, strict=True)
                )
            )
            for i, ring in enumerate(self._rings)
        ]
        arena.allocate(zero=True)

    def _input_sizes(self) -> dict[str, tuple[ElementType, int]]:
        config, rows = self.config, max(INJECT_ROWS, self.config.block_size)
        n_candidates = 0 if config.selector is None else config.selector.n_candidates
        sizes = {
            "tokens": (ElementType.I32, config.block_size),
            "rows": (ElementType.F32, config.block_size * config.n_embd),
            "anchor": (ElementType.I32, max(1, n_candidates)),
            "positions": (ElementType.I32, rows),
        }
        for i, ring in enumerate(self._kinds):
            sizes[f"cells{i}"] = (ElementType.I64, rows)
            sizes[f"mask{i}"] = (ElementType.F16, config.block_size * ring.n_cells)
        return sizes

    def begin(self) -> None:
        """Forget the sequence before; a mask would not hide NaN that it left."""
        n_used = self._n_seen + self.config.block_size
        for ring, cache in zip(self._rings, self._caches, strict=True):
            for x in (cache.k, cache.v):
                zero_tensor(x, 0, min(ring.n_cells, n_used) * x.strides[1])
        self._n_seen = 0

    def observe(self, tokens: Sequence[int], n_past: int, row: int | None = None) -> None:
        """Put keys and values of committed rows into the draft's cache."""
        row = self._see(tokens, n_past, row)
        for start in range(0, len(tokens), INJECT_ROWS):
            n = min(INJECT_ROWS, len(tokens) - start)
            self._set_positions(n_past + start, n)
            at = row + start
            self._cache.get(("inject", self._slot, at, n), partial(self._build_inject, at, n)).run()

    def _set_positions(self, first: int, n: int) -> None:
        positions = np.arange(first, first + n)
        self._inputs["positions"].array[:n] = positions
        self._inputs["positions"].upload(0, n)
        for i, ring in enumerate(self._kinds):
            self._inputs[f"cells{i}"].array[:n] = positions % ring.n_cells
            self._inputs[f"cells{i}"].upload(0, n)

    def _builder(self) -> GraphBuilder:
        return builder_for(self._backend, max_nodes(self.config))

    def _per_layer(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[self._kinds.index(ring)] for ring in self._rings]

    def _build_inject(self, start: int, n: int) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        g = self._builder()
        features = self._forwards.record["features"]
        width, row = features.shape[0], features.strides[1]
        cells = [g.view(self._inputs[f"cells{i}"].tensor, (n,), (), 0) for i in range(len(self._kinds))]
        build_inject(
            g,
            self.config,
            self._weights,
            self._caches,
            g.view(features, (width, n), (row,), start * row),
            g.view(self._inputs["positions"].tensor, (n,), (), 0),
            self._per_layer(cells),
        )
        return g, ()

    def propose(self, anchor: int, n_past: int, n_drafts: int, sampler: Sampler | None) -> Proposal:
        """Run the whole block and keep its first `n_drafts` tokens."""
        block = self.config.block_size
        self._fill_block(anchor, n_past)
        spans = tuple(min(ring.n_cells, bucketed(n_past + block)) for ring in self._kinds)
        drawn = sampler is not None and not sampler.greedy
        want = "candidates" if self.config.selector else "logits" if drawn else "best"
        key = ("block", self._slot, spans, want)
        graph: StepGraph = self._cache.get(key, lambda: self._build_block(spans, want))
        for i, (ring, n_kv) in enumerate(zip(self._kinds, spans, strict=True)):
            mask = self._inputs[f"mask{i}"]
            shaped = mask.array[: block * n_kv].reshape(block, n_kv)
            ring_mask(
                shaped,
                n_past=n_past,
                n_cells=ring.n_cells,
                window=ring.window,
                causal=ring.causal,
                block=block,
            )
            mask.upload(0, block * n_kv)
        outputs = graph.run()
        if want == "best":
            return best_rows(outputs[0].reshape(-1)[:n_drafts], outputs[1].reshape(-1)[:n_drafts])
        if want == "logits":
            assert sampler is not None
            return draw_rows(outputs[0][:n_drafts], sampler)
        n = self.config.selector.n_candidates if self.config.selector else 0
        scores = outputs[1].reshape(-1, n, n)  # [row, predecessor, successor]
        n_vocab = self._forwards.model.config.n_vocab
        return walk(outputs[0][:n_drafts], scores[:n_drafts], sampler if drawn else None, n_vocab)

    def needs(self, probe: MemoryProbe) -> int:
        """Bytes of its largest graph of a whole context, without running one."""
        spans = tuple(ring.n_cells for ring in self._kinds)
        wants = ("candidates",) if self.config.selector else ("best", "logits")
        rows = min(INJECT_ROWS, self._forwards.space.shared.n_rows)
        block = probe.largest(
            (("block", spans, want), partial(self._graph_of, self._build_block, spans, want))
            for want in wants
        )
        inject = probe.graph(("inject", rows), partial(self._graph_of, self._build_inject, 0, rows)).compute
        return max(block, inject)

    @staticmethod
    def _graph_of(
        build: Callable[..., tuple[GraphBuilder, tuple[Tensor, ...]]], *arguments: Any
    ) -> GraphBuilder:
        return build(*arguments)[0]

    def _fill_block(self, anchor: int, n_past: int) -> None:
        block, inputs = self.config.block_size, self._inputs
        self._set_positions(n_past, block)
        if self._forwards.gather is None:
            inputs["tokens"].array[:] = [anchor] + [self.config.mask_token] * (block - 1)
            inputs["tokens"].upload(0, block)
        else:  # a forward of the target may have fewer rows than the block, never fewer than two
            rows = inputs["rows"].array.reshape(block, -1)
            rows[0], rows[1:] = self._forwards.gather.gather((anchor, self.config.mask_token))
            inputs["rows"].upload(0, rows.size)
        inputs["anchor"].array[:] = anchor
        inputs["anchor"].upload(0, len(inputs["anchor"].array))

    def _build_block(self, spans: tuple[int, ...], want: str) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
        g, config, block = self._builder(), self.config, self.config.block_size
        target, inputs = self._forwards.model.weights, self._inputs
        if self._forwards.gather is None:
            rows = g.get_rows(target[EMBEDDING], g.view(inputs["tokens"].tensor, (block,), (), 0))
        else:
            rows = g.view(inputs["rows"].tensor, (config.n_embd, block), (4 * config.n_embd,), 0)
        masks = [
            g.view(inputs[f"mask{i}"].tensor, (n_kv, block), (2 * n_kv,), 0) for i, n_kv in enumerate(spans)
        ]
        cells = [g.view(inputs[f"cells{i}"].tensor, (block,), (), 0) for i in range(len(self._kinds))]
        hidden = build_block(
            g,
            config,
            self._weights,
            self._caches,
            BlockInputs(
                rows=rows,
                positions=g.view(inputs["positions"].tensor, (block,), (), 0),
                cells=self._per_layer(cells),
                masks=self._per_layer(masks),
                flash_attn=self._forwards.model.flash_attn,
            ),
        )
        row = hidden.strides[1]
        hidden = g.cont(g.view(hidden, (config.n_embd, block - 1), (row,), row))  # row 0 proposes nothing
        logits = build_logits(g, config, target[HEAD], hidden)
        if want == "logits":
            return g, (g.output(logits),)
        if want == "best":
            ids = g.best_k(logits, 1)
            values = g.get_rows(g.reshape(logits, 1, logits.shape[0], logits.shape[1]), ids)
            return g, (g.output(ids), g.output(values))
        anchor = inputs["anchor"].tensor
        ids, scores = build_candidates(g, config, self._weights, hidden, logits, anchor)
        return g, (g.output(ids), g.output(scores))

    @cached_property
    def kind(self) -> str:
        """Names the draft: keys and values of one mean nothing to another. See `Companion`."""
        return f"dflash {model_identity(self._weights.file).hex()}"

    def parts(self, n_past: int) -> tuple[Part, ...]:
        """The cells that `n_past` positions fill, layer by layer; blocks wrote some more."""
        n_written = self._n_seen + self.config.block_size
        return tuple(
            row_part(tensor, min(n_past, ring.n_cells), min(n_written, ring.n_cells))
            for ring, cache in zip(self._rings, self._caches, strict=True)
            for tensor in (cache.k, cache.v)
        )


def best_rows(ids: npt.NDArray[Any], values: npt.NDArray[Any]) -> Proposal:
    """The best token of each row I32 [rows], up to the first whose logit F32 [rows] is NaN."""
    unusable = np.flatnonzero(np.isnan(values))
    return Proposal(tuple(int(t) for t in ids[: unusable[0] if len(unusable) else None]))


def draw_rows(logits: npt.NDArray[Any], sampler: Sampler) -> Proposal:
    """Draw one token per row of F32 [rows, n_vocab], each from its own distribution."""
    tokens, distributions = [], []
    for row in logits:
        q = distribution(row, sampler)
        if q is None:
            break
        tokens.append(sampler.draw(q))
        distributions.append(q)
    return Proposal(tuple(tokens), tuple(distributions))


def walk(ids: npt.NDArray[Any], scores: npt.NDArray[Any], sampler: Sampler | None, n_vocab: int) -> Proposal:
    """Choose a candidate per row, each scored behind the one before.

    ids [rows, n], scores [rows, predecessor, successor]; row 0 has the newest token as every predecessor.
    """
    tokens: list[int] = []
    distributions: list[npt.NDArray[np.float64]] = []
    before = 0
    for row, pairs in zip(ids, scores, strict=True):
        following = pairs[before].astype(np.float64)
        best = following.max()
        if not np.isfinite(best):
            break
        if sampler is None:
            before = int(np.argmax(following))
        else:
            with np.errstate(over="ignore"):  # a tiny temperature takes the distance to -inf: weight 0
                weights = np.exp((following - best) / sampler.temperature)
            before = sampler.draw(weights)
            distributions.append(np.zeros(n_vocab))
            distributions[-1][row] = weights / weights.sum()
        tokens.append(int(row[before]))
    return Proposal(tuple(tokens), tuple(distributions) if sampler is not None else None)
