"""What goes into a forward: tokens or embedding rows, positions, cache rows, the mask, and what an
architecture asks for beyond these. Layer 6."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.arch.base import Architecture, Capture, FedRows, Feeder, GraphKey, Record, Step, Tap
from pyggml_dflash.engine.graph_cache import place
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import EMBEDDING, LoadedWeights

BUCKET: Final = 256  # cache rows; GPU attention kernels want multiples of it


def bucketed(n: int) -> int:
    """`n` rounded up to a whole number of buckets."""
    return -(-n // BUCKET) * BUCKET


@dataclass(frozen=True, slots=True)
class Place:
    """Where a forward's rows and their masks begin, in inputs that have those of others, too."""

    row: int = 0
    cell: int = 0  # of the masks, one behind the other

    def behind(self, key: GraphKey) -> Place:
        """Where those behind a forward of this key begin."""
        return Place(self.row + key.n_tokens, self.cell + key.n_tokens * key.n_kv)


START: Final = Place()


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
        self._graph, self._n_rows = place(self._host, g, (rows,), self._allocator), n_rows

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
        architecture: Architecture,
        config: ModelConfig,
        *,
        max_rows: int,
        max_kv: int,
        embedded: bool,
    ) -> None:
        n_first = max_rows * config.n_embd if embedded else max_rows
        extra = architecture.extra_inputs(config, max_rows, max_kv)
        self._arena = InputArena(
            backend,
            ledger,
            "inputs",
            {
                "x": (ElementType.F32 if embedded else ElementType.I32, n_first),
                "positions": (ElementType.I32, max_rows),
                "rows": (ElementType.I64, max_rows),
                "mask": (ElementType.F16, max_rows * max_kv),
                "log": (ElementType.I64, max_rows),
                **extra,
            },
        )
        self.log = self._arena["log"]
        self.x, self.positions = self._arena["x"], self._arena["positions"]
        self.rows, self.mask = self._arena["rows"], self._arena["mask"]
        self._extra = {name: self._arena[name] for name in extra}
        self._extra_arrays = {name: x.array for name, x in self._extra.items()}
        n_triangle = 0 if ledger.dry else max_rows
        self._triangle = np.triu(np.full((n_triangle, n_triangle), -np.inf, np.float16), 1)
        self._n_embd, self._embedded = config.n_embd, embedded
        self._shown: int | None = None  # the last cache row that a one-row mask shows

    def step(
        self,
        g: GraphBuilder,
        key: GraphKey,
        flash_attn: bool,
        tap: Tap | None,
        record: Record | None = None,
        capture: Capture | None = None,
        *,
        tiled: bool = False,
        at: Place = START,
    ) -> Step:
        """The input tensors as a graph of this key sees them; `tiled`: rows attend as `arch.tiled` says.

        `at`: where its rows begin, if they are some of those of a graph. Without cache rows it has no mask.
        """
        n, x = key.n_tokens, self.x.tensor
        row = 4 * self._n_embd
        return Step(
            key=key,
            tokens=None if self._embedded else g.view(x, (n,), (), 4 * at.row),
            embeddings=g.view(x, (self._n_embd, n), (row,), row * at.row) if self._embedded else None,
            positions=g.view(self.positions.tensor, (n,), (), 4 * at.row),
            rows=g.view(self.rows.tensor, (n,), (), 8 * at.row),
            mask=g.view(self.mask.tensor, (key.n_kv, n), (2 * key.n_kv,), 2 * at.cell) if key.n_kv else None,
            flash_attn=flash_attn,
            tap=tap,
            extra={name: x.tensor for name, x in self._extra.items()},
            record=record,
            capture=capture,
            log=None if capture is None else g.view(self.log.tensor, (n,), (), 8 * at.row),
            tile_masks={} if tiled else None,
        )

    def fill(self, x: npt.ArrayLike, n: int, slot: int, n_past: int, n_ctx: int, at: Place = START) -> None:
        """Write tokens or embedding rows, positions and cache rows of `n` rows after `n_past`."""
        width, start, end = self._n_embd if self._embedded else 1, at.row, at.row + n
        self.x.array[width * start : width * end] = x
        self.positions.array[start:end] = range(n_past, n_past + n)
        first = slot * n_ctx + n_past
        self.rows.array[start:end] = range(first, first + n)
        self.x.upload(width * start, width * end)
        self.positions.upload(start, end)
        self.rows.upload(start, end)

    def fill_log(self, n: int, first: int, at: Place = START) -> None:
        """Write which rows of the record a capture of `n` rows goes to."""
        self.log.array[at.row : at.row + n] = range(first, first + n)
        self.log.upload(at.row, at.row + n)

    def fill_one(self, x: npt.ArrayLike, slot: int, n_past: int, n_ctx: int) -> None:
        """`fill` and the mask for a single row, which changes in one element from step to step."""
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
        self.show_one(n_past)

    def show_one(self, n_past: int) -> None:
        """Write the mask of a single row: it sees `n_past` cache rows and its own."""
        mask, shown = self.mask.array, self._shown
        if shown is None:
            mask[: n_past + 1] = 0
            mask[n_past + 1 :] = -np.inf
            self.mask.upload(0, len(mask))
        elif n_past > shown:
            mask[shown + 1 : n_past + 1] = 0
            self.mask.upload(shown + 1, n_past + 1)
        elif n_past < shown:
            mask[n_past + 1 : shown + 1] = -np.inf
            self.mask.upload(n_past + 1, shown + 1)
        self._shown = n_past

    def fill_mask(self, n: int, n_past: int, n_kv: int, at: Place = START) -> None:
        """Row i sees cache rows up to n_past + i."""
        end = at.cell + n * n_kv
        mask = self.mask.array[at.cell : end].reshape(n, n_kv)
        mask[:, :n_past] = 0
        mask[:, n_past : n_past + n] = self._triangle[:n, :n]
        mask[:, n_past + n :] = -np.inf
        self.mask.upload(at.cell, end)

    def feed(self, feeder: Feeder, rows: FedRows) -> None:
        """Have the extra inputs of a forward computed and written."""
        for name, n in feeder.fill(self._extra_arrays, rows).items():
            self._extra[name].upload(0, n)

    def close(self) -> None:
        """Free the tensors."""
        self._arena.close()
