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
StateUpdate = Literal["commit", "snapshots", "replay"]
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
    """What the topology of a forward depends on; two steps with one key can share a graph.

    `update` says what becomes of the recurrent state: overwritten with the state after the last row
    ('commit'), or left as it is while what a later `build_commit` needs is recorded: the state after
    every row ('snapshots'), or the rows that the recurrence was fed with ('replay').
    """

    n_tokens: int
    n_kv: int  # cache rows attended to, a whole number of buckets
    slot: int
    output: OutputKind
    update: StateUpdate = "commit"
    capture: bool = False  # record what a drafter reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What a drafter reads of a target forward: inputs of layers, in this order, and the head's input."""

    layers: tuple[int, ...] = ()
    hidden: bool = False


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
    record: Record | None = None  # where verify forwards and captures write
    capture: Capture | None = None  # what the key's `capture` asks for

    def show(self, name: str, x: Tensor) -> None:
        """Offer `x` to whoever looks inside."""
        if self.tap is not None:
            self.tap(name, x)

    def capture_layer(self, g: GraphBuilder, layer: int, x: Tensor) -> None:
        """Record x [n_embd, M], the input of a trunk layer, if the drafter reads it."""
        if self.capture is None or layer not in self.capture.layers:
            return
        assert self.record is not None
        target, width = self.record["features"], x.shape[0]
        row, offset = target.strides[1], 4 * width * self.capture.layers.index(layer)
        g.expand(g.copy(x, g.view(target, (width, x.shape[1]), (row,), offset)))

    def capture_hidden(self, g: GraphBuilder, x: Tensor) -> None:
        """Record x [n_embd, M], what the head reads, behind the row that was recorded last."""
        if self.capture is None or not self.capture.hidden:
            return
        assert self.record is not None
        target = self.record["hidden"]
        row = target.strides[1]
        g.expand(g.copy(x, g.view(target, (x.shape[0], x.shape[1]), (row,), row)))

    @property
    def needs_all_rows(self) -> bool:
        """True if the last layer has to be computed for every row."""
        return self.key.output == "all" or (self.capture is not None and self.capture.hidden)


State = Mapping[str, Tensor]
Record = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Which rows of a recorded forward become part of a slot's state."""

    slot: int
    update: StateUpdate
    width: int  # rows of the forward
    n_keep: int  # its first rows that stay


class Architecture(Protocol):
    """One family of models. Stateless; one instance serves every model of the family."""

    @property
    def names(self) -> tuple[str, ...]:
        """Values of general.architecture."""

    @property
    def supports_auto_ctx(self) -> bool:
        """True if measured graphs and the state's layout tell what a context takes."""

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

    def record_tensors(self, config: ModelConfig, update: StateUpdate, width: int) -> tuple[StateTensor, ...]:
        """What forwards of up to `width` rows record instead of committing the recurrent state."""

    def build_commit(
        self,
        g: GraphBuilder,
        config: ModelConfig,
        weights: LoadedWeights,
        state: State,
        record: Record,
        commit: Commit,
    ) -> None:
        """Append what brings the recurrent state to the first `n_keep` rows of a recorded forward."""
