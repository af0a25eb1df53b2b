"""What an architecture is to the rest of the engine: configuration, tensors, state, forward. Layer 4.

`StateLayout` is the single list of a slot's tensors; allocation, reset, planning and everything that
copies state walks it, so none of them can forget a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import LoadedWeights, TensorSpec

OutputKind = Literal["none", "last", "all"]
Tap = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a slot: `shape` is one slot's, in ggml's order; slots are stacked behind it.

    A tensor that `grows` holds one row of `shape[0]` elements per position; the others are recurrent:
    they have one value for the whole past and start as zeros.
    """

    name: str
    type: ElementType
    shape: tuple[int, ...]
    grows: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of one slot's part."""
        rows = 1
        for n in self.shape[1:]:
            rows *= n
        return self.type.row_bytes(self.shape[0]) * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Every tensor of a slot with room for `n_ctx` positions."""

    n_ctx: int
    tensors: tuple[StateTensor, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(t.n_bytes for t in self.tensors)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of one slot that do not depend on `n_ctx`."""
        return sum(t.n_bytes for t in self.tensors if not t.grows)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """What the topology of a forward depends on; two steps with one key can share a graph."""

    n_tokens: int
    n_kv: int  # cache rows attended to, a whole number of buckets
    slot: int
    output: OutputKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The inputs of one forward as tensors, and where it stands.

    positions I32 [n_tokens], rows I64 [n_tokens] (cache rows to write), mask F16 [n_kv, n_tokens];
    `tokens` I32 [n_tokens], or `embeddings` F32 [n_embd, n_tokens] where the table is elsewhere.
    """

    key: GraphKey
    tokens: Tensor | None
    embeddings: Tensor | None
    positions: Tensor
    rows: Tensor
    mask: Tensor
    flash_attn: bool
    tap: Tap | None = None  # called with named intermediate tensors, to look inside a forward

    def show(self, name: str, x: Tensor) -> None:
        """Offer `x` to whoever looks inside."""
        if self.tap is not None:
            self.tap(name, x)


State = Mapping[str, Tensor]


class Architecture(Protocol):
    """One family of models. Stateless; one instance serves every model of the family."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of general.architecture."""

    def read_config(self, file: GgufFile, name: str) -> ModelConfig:
        """The model's numbers, checked; raises `ModelFileError`."""

    def tensors(self, config: ModelConfig, file: GgufFile) -> list[TensorSpec]:
        """Every tensor that a forward may use."""

    def state_layout(
        self, config: ModelConfig, n_ctx: int, type_k: ElementType, type_v: ElementType
    ) -> StateLayout:
        """The state of one slot."""

    def max_nodes(self, config: ModelConfig) -> int:
        """An upper bound on the operations of one forward."""

    def build(
        self, g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, state: State, step: Step
    ) -> Tensor | None:
        """Append a forward to the graph, state writes included.

        Returns the logits F32 [n_vocab, rows], or None for output 'none'.
        """
