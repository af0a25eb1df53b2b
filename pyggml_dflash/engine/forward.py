"""What a forward is built from, and building it as a graph without memory. Layer 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pyggml_dflash.arch.base import Architecture, Capture, GraphKey, StateTensor, StateUpdate, Step, Tap
from pyggml_dflash.arch.tiled import TILE_ROWS, mask_rows
from pyggml_dflash.engine.batching import most_ragged_rows
from pyggml_dflash.engine.inputs import Inputs
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.element import ElementType
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.padding import NO_PADDING, Paddings
from pyggml_dflash.ggml.placement import builder_for
from pyggml_dflash.ggml.tensor import Tensor
from pyggml_dflash.model.config import ModelConfig
from pyggml_dflash.model.weights import LoadedWeights

MakeStep = Callable[[GraphBuilder], Step]
TILED_NODES: Final = 8  # that attention in whole tiles has beyond those of attention, in a layer


@dataclass(frozen=True, slots=True)
class Model:
    """What a forward is built from."""

    architecture: Architecture
    config: ModelConfig
    weights: LoadedWeights
    flash_attn: bool
    plain_kv: range = range(0)  # cache rows over which decode and verify attend without flash attention
    paddings: Paddings = NO_PADDING  # of products with its weights
    stream_rows: int = 0  # fewest rows for which experts are copied to the target; 0: never
    tiles: bool = False  # flash attention has tiles for its caches, which few rows do not fill

    def uses_flash(self, key: GraphKey) -> bool:
        """Whether a forward of this key uses flash attention; the same for decode and verify."""
        return self.flash_attn and (_is_prompt(key) or key.n_kv not in self.plain_kv)

    def in_tiles(self, key: GraphKey) -> bool:
        """Whether rows of such a forward fill tiles of flash attention together, where that is faster."""
        return self.tiles and self.flash_attn and _is_prompt(key) and key.n_tokens < TILE_ROWS

    def mask_rows(self, n_tokens: int) -> int:
        """Rows of the mask of a prompt forward of `n_tokens` rows."""
        n_sharing = self.config.n_head // self.config.n_head_kv
        return mask_rows(n_tokens, n_sharing) if self.tiles and self.flash_attn else n_tokens


def _is_prompt(key: GraphKey) -> bool:
    return key.n_tokens > 1 and key.update == "commit" and not key.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What forwards record for a drafter, and how a verify forward can be taken back."""

    capture: Capture
    update: StateUpdate  # 'snapshots' or 'replay'
    max_width: int  # rows of the widest verify forward


def record_layout(model: Model, recording: Recording, max_rows: int) -> tuple[StateTensor, ...]:
    """Tensors that forwards of up to `max_rows` rows record into."""
    config, capture = model.config, recording.capture
    found = list(model.architecture.record_tensors(config, recording.update, recording.max_width))
    if capture.layers:
        shape = (config.n_embd * len(capture.layers), max_rows)
        found.append(StateTensor(name="features", type=ElementType.F32, shape=shape, grows=False))
    if capture.hidden:
        shape = (config.hidden_width, max_rows + 1)  # row 0 is the one before the forward
        found.append(StateTensor(name="hidden", type=ElementType.F32, shape=shape, grows=False))
    return tuple(found)


def record_places(model: Model, recording: Recording, n_slots: int) -> tuple[tuple[StateTensor, ...], ...]:
    """What ragged forwards record into for each of their slots but the first, which has `record_layout`."""
    tensors = tuple(model.architecture.record_tensors(model.config, recording.update, recording.max_width))
    n_places = min(n_slots, most_ragged_rows(n_slots, recording.max_width))
    return (tensors,) * max(0, n_places - 1)


def build_forward(
    backend: Backend,
    model: Model,
    state: dict[str, Tensor],
    inputs: Inputs,
    key: GraphKey,
    tap: Tap | None = None,
    record: dict[str, Tensor] | None = None,
    recording: Recording | None = None,
) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
    """A forward as a graph without memory, and what to read from it: the logits, if the key asks."""
    capture = recording.capture if recording is not None and key.capture else None
    flash_attn, tiled = model.uses_flash(key), model.in_tiles(key)
    return build_graph(
        backend,
        model,
        state,
        [(key, lambda g: inputs.step(g, key, flash_attn, tap, record, capture, tiled=tiled))],
    )


def build_graph(
    backend: Backend,
    model: Model,
    state: dict[str, Tensor],
    forwards: Sequence[tuple[GraphKey, MakeStep]],
) -> tuple[GraphBuilder, tuple[Tensor, ...]]:
    """As `build_forward`, one behind the other in one graph, with inputs that are made for each."""
    max_nodes = sum(model.architecture.max_nodes(model.config, len(key.parts)) + 64 for key, _ in forwards)
    max_nodes += max_nodes // model.config.n_layer  # the end of the last layer may be there twice
    max_nodes += max_nodes // 2 if model.paddings else 0
    alone = (part for key, _ in forwards for part in key.parts or (key,))
    max_nodes += sum(TILED_NODES * model.config.n_layer for key in alone if model.in_tiles(key))
    builder = builder_for(backend, max_nodes, model.paddings, stream_rows=model.stream_rows)
    outputs: list[Tensor] = []
    try:
        for i, (_, step) in enumerate(forwards):
            if i:
                builder.begin_forward()
            logits = model.architecture.build(builder, model.config, model.weights, state, step(builder))
            if logits is not None:
                outputs.append(builder.output(logits))
        return builder, tuple(outputs)
    except BaseException:
        builder.close()
        raise
