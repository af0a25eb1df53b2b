"""Products with weights: which of them a graph has, and running one by itself. Layer 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ffi import c_string, lib
from pyggml_dflash.ggml.graph import GraphAllocator, InputArena, StepGraph
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.placement import builder_for
from pyggml_dflash.ggml.tensor import Tensor, WeightKind


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

    def __init__(self, backend: Backend, ledger: Ledger, wanted: Iterable[Product], max_rows: int) -> None:
        wanted = list(wanted)
        n_in = max((p.n_in for p in wanted), default=1)
        n_used = max((p.n_used for p in wanted), default=0)
        self._backend = backend
        sizes = {"x": (ElementType.F32, n_in * max_rows), "ids": (ElementType.I32, max(1, n_used) * max_rows)}
        with ExitStack() as stack:
            self._inputs = InputArena(backend, ledger, "inputs", sizes)
            stack.callback(self._inputs.close)
            self._allocator = GraphAllocator(backend, ledger, "products")
            stack.callback(self._allocator.close)
            self._stack = stack.pop_all()
        self._row = np.random.default_rng(0).standard_normal(n_in).astype(np.float32)

    def run(self, product: Product, n: int, first_expert: Sequence[int] = ()) -> npt.NDArray[np.float32]:
        """Results [n, ..] of `n` equal rows; row i chooses its experts from `first_expert[i]` on."""
        g, x, width = builder_for(self._backend, 64), self._inputs["x"], product.n_in
        x.array[: n * width] = np.tile(self._row[:width], n)
        x.upload(0, n * width)
        graph = StepGraph(
            self._backend, g, (g.output(self._build(g, product, n, first_expert)),), self._allocator
        )
        try:
            return graph.run()[0].reshape(n, -1).copy()
        finally:
            graph.close()

    def _build(self, g: GraphBuilder, product: Product, n: int, first_expert: Sequence[int]) -> Tensor:
        k, n_inputs, n_used = product.kind.shape[0], product.n_inputs, product.n_used
        x = self._inputs["x"].tensor
        g.follow(product.weight)
        if not n_used:
            return g.mul_mat(product.weight, g.view(x, (k, n), (4 * k,), 0))
        ids = self._inputs["ids"]
        chosen = (np.array(first_expert)[:, None] + np.arange(n_used)) % product.kind.shape[2]
        ids.array[: n * n_used] = chosen.reshape(-1)
        ids.upload(0, n * n_used)
        rows = g.view(x, (k, n_inputs, n), (4 * k, 4 * k * n_inputs), 0)
        return g.mul_mat_id(product.weight, rows, g.view(ids.tensor, (n_used, n), (4 * n_used,), 0))

    def close(self) -> None:
        """Free inputs and memory."""
        self._stack.close()
