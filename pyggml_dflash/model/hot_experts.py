"""Copies of the experts that are picked most, on the target, and the tables that lead to them. Layer 2.

A layer with copies has, beside the stacks of all experts, stacks `ffn_X_hot` of the copied ones and two
tables over all experts, each with a mask: where an expert lies among the copies, and where among all. An
expert that the one stack does not answer for is looked up as any other and counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from pyggml_dflash.ggml.arena import TensorArena, write
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf_part import TensorInfo
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile

STACKS = ("gate", "up", "gate_up", "down")


def expert_tensors(file: TensorFile, layer: int) -> Iterator[tuple[str, TensorInfo]]:
    """What a layer's experts have each a part of, by the name of their copies."""
    for stack in STACKS:
        for part in ("weight", "scale"):
            info = file.tensors.get(f"blk.{layer}.ffn_{stack}_exps.{part}")
            if info is not None:
                yield f"blk.{layer}.ffn_{stack}_hot.{part}", info


def expert_bytes(file: TensorFile, layer: int, n_expert: int) -> int:
    """Bytes of one expert of a layer."""
    return sum(info.n_bytes // n_expert for _, info in expert_tensors(file, layer))


class HotExperts:
    """The copies and tables of every layer that has some; owns their memory."""

    def __init__(
        self,
        file: TensorFile,
        layers: Sequence[Sequence[int]],
        n_expert: int,
        backend: Backend,
        ledger: Ledger,
    ) -> None:
        """`layers`: per layer the experts to copy. With a dry ledger nothing is read."""
        self.tensors: dict[str, Tensor] = {}
        with ExitStack() as stack:
            arena = TensorArena(backend, ledger, "hot experts", n_tensors=12 * max(1, len(layers)))
            stack.callback(arena.close)
            for layer, hot in enumerate(layers):
                if hot:
                    self._declare(arena, file, layer, len(hot), n_expert)
            arena.allocate()
            if not ledger.dry:
                for layer, hot in enumerate(layers):
                    if hot:
                        self._fill(file, layer, hot, n_expert)
                        backend.check_alive()
            self._stack = stack.pop_all()

    def _declare(self, arena: TensorArena, file: TensorFile, layer: int, n_hot: int, n_expert: int) -> None:
        for name, info in expert_tensors(file, layer):
            shape = (*info.shape[:-1], n_hot)
            self.tensors[name] = arena.declare(name, info.type, *shape)
        for stack in ("hot", "cold"):
            for table, type in (("index", ElementType.I32), ("mask", ElementType.F32)):
                name = f"blk.{layer}.{stack}.{table}"
                self.tensors[name] = arena.declare(name, type, 1, n_expert)

    def _fill(self, file: TensorFile, layer: int, hot: Sequence[int], n_expert: int) -> None:
        for name, info in expert_tensors(file, layer):
            data, size = file.data(info), info.n_bytes // n_expert
            for place, expert in enumerate(hot):
                write(self.tensors[name], data[expert * size : (expert + 1) * size], place * size)
        is_hot = np.zeros(n_expert, bool)
        is_hot[list(hot)] = True
        among_hot, among_all = np.zeros(n_expert, np.int32), np.arange(n_expert, dtype=np.int32)
        among_hot[list(hot)] = np.arange(len(hot), dtype=np.int32)
        among_all[is_hot] = 0 if is_hot.all() else int(np.flatnonzero(~is_hot)[0])
        for stack, index, mask in (("hot", among_hot, is_hot), ("cold", among_all, ~is_hot)):
            write(self.tensors[f"blk.{layer}.{stack}.index"], index)
            write(self.tensors[f"blk.{layer}.{stack}.mask"], mask.astype(np.float32))

    def close(self) -> None:
        """Free the copies; a second call does nothing."""
        self.tensors.clear()
        self._stack.close()
