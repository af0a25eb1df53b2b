"""What an architecture is to the rest of the engine: configuration, tensors, state, forward. Layer 4.

`StateLayout` is the single list of a slot's tensors; allocation, reset, planning and everything that
copies state walks it, so none of them can forget a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, Literal, Protocol

import numpy.typing as npt

from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.ggml.tensor_file import TensorFile
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import LoadedWeights, TensorSpec

OutputKind = Literal["none", "last", "all"]
StateUpdate = Literal["commit", "snapshots", "replay"]
Tap = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a slot: `shape` is one slot's, in ggml's order; slots are stacked behind it.

    A tensor that `grows` holds one row of `shape[0]` elements per `positions_per_row` positions; the
    others are recurrent: they have one value for the whole past and start as zeros.
    """

    name: str
    type: ElementType
    shape: tuple[int, ...]
    grows: bool
    positions_per_row: int = 1

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
    form: str = ""  # which of its forms of a forward the architecture chose; most have one
    parts: tuple[GraphKey, ...] = ()  # what each row, or each prompt's rows, are alone, if they attend so

    @property
    def mixes_slots(self) -> bool:
        """True if rows are of several slots."""
        return self.slot < 0

    @classmethod
    def batch(cls, parts: tuple[GraphKey, ...]) -> GraphKey:
        """One row of each of several slots: forwards of one row, in one graph."""
        assert len({part.slot for part in parts}) == len(parts)
        captures = any(part.capture for part in parts)
        return cls(n_tokens=len(parts), n_kv=0, slot=-1, output="all", capture=captures, parts=parts)

    @classmethod
    def ragged(cls, parts: tuple[GraphKey, ...], update: StateUpdate) -> GraphKey:
        """Some rows of each of several slots, one slot's behind the other's; all may be taken back."""
        return cls(
            n_tokens=len(parts), n_kv=0, slot=-1, output="all", update=update, capture=True, parts=parts
        )

    @classmethod
    def prompts(cls, parts: tuple[GraphKey, ...]) -> GraphKey:
        """Forwards of the prompts of several slots, in one graph; logits are of the last row of some."""
        assert all(part.output != "all" and part.update == "commit" for part in parts)
        return cls(
            n_tokens=sum(part.n_tokens for part in parts),
            n_kv=0,
            slot=-1,
            output="last" if any(part.output == "last" for part in parts) else "none",
            capture=any(part.capture for part in parts),
            parts=parts,
        )

    @property
    def joins_prompts(self) -> bool:
        """True for prompts of several slots, each of which attends on its own and records on its own."""
        return self.mixes_slots and self.output != "all"

    @property
    def stretches(self) -> tuple[tuple[int, int, int], ...]:
        """Of a key that mixes slots, for each slot: the slot, its first row, and how many rows it has."""
        found, start = list[tuple[int, int, int]](), 0
        for slot, parts in groupby(self.parts, lambda part: part.slot):
            n = sum(part.n_tokens for part in parts)
            found.append((slot, start, n))
            start += n
        assert len({slot for slot, _, _ in found}) == len(found), "a slot's rows lie one behind the other"
        return tuple(found)

    @property
    def rows_with_logits(self) -> tuple[int, ...]:
        """Where logits are wanted of the last row, or of that of some prompts: which rows that are."""
        if not self.mixes_slots:
            return (self.n_tokens - 1,)
        ends = accumulate(part.n_tokens for part in self.parts)
        return tuple(end - 1 for end, part in zip(ends, self.parts, strict=True) if part.output == "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What a drafter reads of a target forward: inputs of layers, in this order, and the head's input."""

    layers: tuple[int, ...] = ()
    hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The inputs of one forward as tensors, and where it stands.

    positions I32 [n_tokens], rows I64 [n_tokens] (cache rows to write), mask F16 [n_kv, n_tokens], log I64
    [n_tokens] (rows of the record that captures write, None where nothing is captured);
    `tokens` I32 [n_tokens], or `embeddings` F32 [n_embd, n_tokens] where the table is elsewhere.

    Rows with `tile_masks` attend as `arch.tiled` says; masks made for that are kept there, by how many heads
    share keys and by the place of the backend.

    Where rows attend on their own, `parts` are their steps, each with cache rows, mask and inputs as if it
    were alone. In a batch, where each is of another slot, `slots` I32 [n_tokens] tells which. In a ragged
    forward, where a slot may have several rows, and where prompts are joined, `stretches` tell which are
    whose; a part of a joined prompt has all rows of its slot.
    """

    key: GraphKey
    tokens: Tensor | None
    embeddings: Tensor | None
    positions: Tensor
    rows: Tensor
    mask: Tensor | None  # None where each part has its own
    flash_attn: bool
    tap: Tap | None = None  # called with named intermediate tensors, to look inside a forward
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # the architecture's own inputs, flat
    record: Record | None = None  # where verify forwards and captures write
    capture: Capture | None = None  # what the key's `capture` asks for
    log: Tensor | None = None
    parts: tuple[Step, ...] = ()
    slots: Tensor | None = None
    stretches: tuple[Stretch, ...] = ()
    tile_masks: dict[tuple[int, int], Tensor] | None = None

    def show(self, name: str, x: Tensor) -> None:
        """Offer `x` to whoever looks inside."""
        if self.tap is not None:
            self.tap(name, x)

    def capture_layer(self, g: GraphBuilder, layer: int, x: Tensor) -> None:
        """Record x [n_embd, M], the input of a trunk layer, if the drafter reads it."""
        if self.records_apart:
            for part, start in self.parts_from():
                part.capture_layer(g, layer, g.some(x, 1, start, part.key.n_tokens))
            return
        if self.capture is None or layer not in self.capture.layers:
            return
        assert self.record is not None
        assert self.log is not None
        target, width = self.record["features"], x.shape[0]
        row, offset = target.strides[1], 4 * width * self.capture.layers.index(layer)
        g.expand(g.set_rows(g.view(target, (width, target.shape[1]), (row,), offset), x, self.log))

    def capture_hidden(self, g: GraphBuilder, x: Tensor) -> None:
        """Record x [n_embd, M], what the head reads; row 0 is the one before the log's first."""
        if self.records_apart:
            for part, start in self.parts_from():
                part.capture_hidden(g, g.some(x, 1, start, part.key.n_tokens))
            return
        if self.capture is None or not self.capture.hidden:
            return
        assert self.record is not None
        assert self.log is not None
        target = self.record["hidden"]
        width, n, row = target.shape[0], target.shape[1] - 1, target.strides[1]
        g.expand(g.set_rows(g.view(target, (width, n), (row,), row), x, self.log))

    @property
    def records_apart(self) -> bool:
        """True if each part captures what a drafter reads, or does not, on its own."""
        return self.slots is not None or self.key.joins_prompts

    def parts_from(self) -> Iterator[tuple[Step, int]]:
        """The parts, each with the first of its rows."""
        start = 0
        for part in self.parts:
            yield part, start
            start += part.key.n_tokens

    @property
    def needs_all_rows(self) -> bool:
        """True if the last layer has to be computed for every row."""
        if self.key.joins_prompts:
            return any(part.needs_all_rows for part in self.parts)
        return self.key.output == "all" or (self.capture is not None and self.capture.hidden)

    @property
    def ends_alone(self) -> bool:
        """True if logits are wanted of the last row of several, or of that of some joined prompts.

        What leads from the last layer's mixer to them is computed for that row alone, also where all rows
        are: kernels round one row otherwise than many, and a drafter must not show in the target's choice.
        """
        return self.key.output == "last" and self.key.n_tokens > 1


State = Mapping[str, Tensor]
Record = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Rows of one slot in a ragged forward: `n` of them from `start` on, and where they are recorded."""

    slot: int
    start: int
    n: int
    record: Record

    def rows(self, g: GraphBuilder, x: Tensor, dim: int = 1) -> Tensor:
        """Its rows of `x`, whose last dimension `dim` has those of all; no copy."""
        return g.some(x, dim, self.start, self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Which rows of a recorded forward become part of a slot's state."""

    slot: int
    update: StateUpdate
    width: int  # rows of the forward
    n_keep: int  # its first rows that stay
    place: int = 0  # which slot of the forward it was, which tells where its rows are recorded


InputSizes = Mapping[str, tuple[ElementType, int]]  # by name: element type, number of elements


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRows:
    """The rows of a forward, for what is computed on the host: `tokens` stand at `n_past` and behind.

    `before` are the newest tokens in front of them, oldest first, up to `state.slot.RECENT_TOKENS`.
    """

    key: GraphKey
    tokens: Sequence[int]
    before: Sequence[int]
    n_past: int
    n_ctx: int  # cache rows of a slot
    apart: bool = False  # a row of several of a slot, for which only what it attends to is wanted


class Feeder(Protocol):
    """Computes on the host what a model's forwards read beyond tokens, positions, rows and mask."""

    def fill(self, arrays: Mapping[str, npt.NDArray[Any]], rows: FedRows) -> Mapping[str, int]:
        """Write the extra inputs of a forward into flat arrays; by name, how many elements were written."""

    def expect(self, tokens: Sequence[int], before: Sequence[int]) -> None:
        """The next `fill` will likely be for these tokens: begin now what takes long, and return."""

    def close(self) -> None:
        """End what was begun and free everything."""


class MtpBlock(Protocol):
    """A layer behind the trunk that proposes tokens, with a cache of its own.

    A pair is the embedding of a token and the trunk's hidden row in front of that token.
    """

    @property
    def first_token(self) -> int:
        """The first token that has a pair; the hidden row in front of token 0 is zeros."""

    @property
    def shift(self) -> int:
        """The pair of the token at position p stands at position and in cache row p - shift."""

    def tensors(self, file: TensorFile) -> list[TensorSpec]:
        """Its tensors, beyond those of the trunk."""

    def state(self, n_cells: int, type_k: ElementType, type_v: ElementType) -> tuple[StateTensor, ...]:
        """Its cache, with room for `n_cells` pairs."""

    def form(self, n_past: int, n_tokens: int, n_kv: int) -> str:
        """As `Architecture.form`, for the block's own cache."""

    def extra_inputs(self, max_rows: int, n_cells: int) -> InputSizes:
        """As `Architecture.extra_inputs`: up to `max_rows` pairs are injected, one at a time is drafted."""

    def fill_inputs(
        self, arrays: Mapping[str, npt.NDArray[Any]], key: GraphKey, n_past: int, n_cells: int
    ) -> Mapping[str, int]:
        """As `Feeder.fill`, for pairs whose first stands in the cache row `n_past`."""

    def embed(self, g: GraphBuilder, weights: LoadedWeights, tokens: Tensor) -> Tensor:
        """Embedding rows F32 [n_embd, n]."""

    def inject(
        self, g: GraphBuilder, weights: LoadedWeights, state: State, hidden: Tensor, step: Step
    ) -> None:
        """Write into the cache what pairs leave there: `step.embeddings` and `hidden` [hidden_width, n]."""

    def draft(
        self, g: GraphBuilder, weights: LoadedWeights, state: State, hidden: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Run pairs: logits [n_vocab, n], and the hidden rows that the pairs of drafted tokens read."""


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

    def max_nodes(self, config: ModelConfig, n_parts: int = 0) -> int:
        """An upper bound on the operations of one forward, of a batch of `n_parts` rows if there are any."""

    def build(
        self, g: GraphBuilder, config: ModelConfig, weights: LoadedWeights, state: State, step: Step
    ) -> Tensor | None:
        """Append a forward to the graph, state writes included.

        Returns the logits F32 [n_vocab, rows], or None for output 'none'.
        """

    def form(self, config: ModelConfig, n_past: int, n_tokens: int, n_kv: int, *, host: bool) -> str:
        """How it builds a forward of `n_tokens` rows behind `n_past`, over `n_kv` cache rows.

        `host` tells whether that is for a host device. A value of `GraphKey.form`; '' where there is one
        way only.
        """

    def extra_inputs(self, config: ModelConfig, max_rows: int, max_kv: int) -> InputSizes:
        """Inputs of its own that forwards of up to `max_rows` rows and `max_kv` cache rows read."""

    def feeder(self, config: ModelConfig, weights: LoadedWeights) -> Feeder | None:
        """What fills these inputs; None if there are none. The caller closes it, before the weights."""

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
