"""Products with weights: which of them a graph has, and running one by itself. Layer 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import c_string, lib
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.padding import Paddings
from pyggml_dflash.ggml.placement import builder_for
from pyggml_dflash.ggml.tensor import Tensor, WeightKind

MOST_CHOICES: Final = 4  # of experts, in one run
Window = tuple[int, int]  # the first row, and how many there are


@dataclass(frozen=True, slots=True)
class Product:
    """A product of rows with one weight, or with the experts that each row chooses."""

    weight: Tensor
    kind: WeightKind
    n_used: int = 0  # experts per row; 0: the weight has none
    n_inputs: int = 1  # different inputs of a row: one for all its experts, or one for each
    n_times: int = 1  # how many products of the same kind a graph has

    @property
    def n_in(self) -> int:
        """Elements of a row."""
        return self.kind.shape[0] * self.n_inputs

    @property
    def n_out(self) -> int:
        """Results for a row."""
        return self.kind.shape[1] * max(1, self.n_used)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weight that one row reads."""
        n_read = self.n_used / self.kind.shape[2] if self.n_used else 1
        return int(self.weight.n_bytes * n_read)


def products(builder: GraphBuilder) -> list[Product]:
    """Products with weights in a graph, one of each kind and number of experts, the smallest first."""
    found: list[Product] = []
    for i in range(builder.n_nodes):
        node = lib.ggml_graph_node(builder.graph, i)
        op = c_string(lib.ggml_op_name(node.op))
        weight = Tensor(node.src[0]) if op in ("MUL_MAT", "MUL_MAT_ID") else None
        kind = None if weight is None else weight.weight_kind
        if weight is None or kind is None:
            continue
        routed = op == "MUL_MAT_ID"
        n_used, n_inputs = (node.src[2].ne[0], node.src[1].ne[1]) if routed else (0, 1)
        found.append(Product(weight, kind, n_used, n_inputs))
    times = Counter((p.kind, p.n_used, p.n_inputs) for p in found)
    distinct = {(p.kind, p.n_used, p.n_inputs): p for p in found}
    return sorted((replace(p, n_times=times[key]) for key, p in distinct.items()), key=lambda p: p.n_bytes)


class ProductRunner:
    """Runs products by themselves, over up to `max_rows` rows that are all equal."""

    def __init__(
        self, backend: Backend, ledger: Ledger, wanted: Iterable[Product], max_rows: int, max_inputs: int
    ) -> None:
        """`max_inputs`: rows that are tried, each of them equal `max_rows` times."""
        wanted = list(wanted)
        n_in = max((p.n_in for p in wanted), default=1)
        n_used = max((p.n_used for p in wanted), default=0)
        self._backend, self._max_rows, self._max_ids = backend, max_rows, max(1, n_used) * max_rows
        sizes = {
            "x": (ElementType.F32, n_in * max_inputs),
            "ids": (ElementType.I32, MOST_CHOICES * self._max_ids),
        }
        with ExitStack() as stack:
            self._inputs = InputArena(backend, ledger, "inputs", sizes)
            stack.callback(self._inputs.close)
            self._allocator = GraphAllocator(backend, ledger, "products")
            stack.callback(self._allocator.close)
            self._stack = stack.pop_all()
        x = self._inputs["x"]
        if not ledger.dry:
            x.array[:] = np.random.default_rng(0).standard_normal(len(x.array))
            x.upload(0, len(x.array))

    def run(
        self, product: Product, n: int, n_inputs: int, first_experts: Sequence[Sequence[int]] = ((),)
    ) -> npt.NDArray[np.float32]:
        """Results [choice, input, n, ..]: each of `n_inputs` rows, `n` times the same.

        Of a choice of experts row i chooses from `first_experts[choice][i]` on.
        """
        assert len(first_experts) <= MOST_CHOICES
        g = builder_for(self._backend, 64 + 8 * len(first_experts) * n_inputs)
        try:
            found = [
                g.output(self._product(g, product, n, i, choice, firsts))
                for choice, firsts in enumerate(first_experts)
                for i in range(n_inputs)
            ]
            graph = StepGraph(self._backend, g, tuple(found), self._allocator)
            return np.array(graph.run()).reshape(len(first_experts), n_inputs, n, -1)
        finally:
            g.close()

    def agreeing(
        self,
        product: Product,
        most: int,
        windows: Sequence[Window],
        paddings: Paddings,
        *,
        apart: bool = False,
    ) -> list[bool]:
        """For each window into `most` rows, whether its rows give what they give among all of them.

        Rows differ, and products are made as `paddings` says. Of experts all rows choose the same, or each
        its own if they are to be `apart`. The device compares, so no result has to come back.
        """
        g = builder_for(self._backend, 64 + 12 * len(windows), paddings)
        try:
            if product.n_used:
                self._choose(product, apart=apart)
            whole = g.expand(self._window(g, product, 0, most))
            found = [g.output(self._difference(g, product, whole, window)) for window in windows]
            graph = StepGraph(self._backend, g, tuple(found), self._allocator)
            return [not np.any(difference) for difference in graph.run()]
        finally:
            g.close()

    def _difference(self, g: GraphBuilder, product: Product, whole: Tensor, window: Window) -> Tensor:
        """[1, rows]: zero for rows that are as in the whole, NaN for what is no number."""
        start, n = window
        among = g.some(whole, 2 if product.n_used else 1, start, n)
        apart = g.abs(g.sub(self._window(g, product, start, n), among))
        return g.sum_rows(g.reshape(apart, product.n_out, n))

    def _window(self, g: GraphBuilder, product: Product, start: int, n: int) -> Tensor:
        k, n_inputs, n_used = product.kind.shape[0], product.n_inputs, product.n_used
        g.follow(product.weight)
        x, first = self._inputs["x"].tensor, 4 * start * product.n_in
        if not n_used:
            return g.mul_mat(product.weight, g.view(x, (k, n), (4 * k,), first))
        ids = g.view(self._inputs["ids"].tensor, (n_used, n), (4 * n_used,), 4 * start * n_used)
        rows = g.view(x, (k, n_inputs, n), (4 * k, 4 * product.n_in), first)
        return g.mul_mat_id(product.weight, rows, ids)

    def _choose(self, product: Product, *, apart: bool) -> None:
        ids, n = self._inputs["ids"], self._max_rows * product.n_used
        firsts = np.arange(self._max_rows)[:, None] * (product.n_used if apart else 0)
        ids.array[:n] = ((firsts + np.arange(product.n_used)) % product.kind.shape[2]).reshape(-1)
        ids.upload(0, n)

    def _product(
        self, g: GraphBuilder, product: Product, n: int, i: int, choice: int, firsts: Sequence[int]
    ) -> Tensor:
        k, n_inputs, n_used = product.kind.shape[0], product.n_inputs, product.n_used
        g.follow(product.weight)
        row = g.view(self._inputs["x"].tensor, (k, n_inputs), (4 * k,), 4 * i * product.n_in)
        if not n_used:
            return g.mul_mat(product.weight, row if n == 1 else g.repeat(row, k, n, 1, 1))
        ids, start = self._inputs["ids"], choice * self._max_ids
        chosen = (np.array(firsts)[:, None] + np.arange(n_used)) % product.kind.shape[2]
        ids.array[start : start + n * n_used] = chosen.reshape(-1)
        ids.upload(start, start + n * n_used)
        chosen_ids = g.view(ids.tensor, (n_used, n), (4 * n_used,), 4 * start)
        rows = g.reshape(row, k, n_inputs, 1)
        return g.mul_mat_id(product.weight, rows if n == 1 else g.repeat(rows, k, n_inputs, n, 1), chosen_ids)

    def close(self) -> None:
        """Free inputs and memory."""
        self._stack.close()
