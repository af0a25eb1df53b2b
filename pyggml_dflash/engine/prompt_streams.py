"""Long chunks of a prompt as two forwards that take turns on the devices of a split. Layer 6.

While one device has a part of the first forward, the other has the part before it of the second, which reads
the state that the first one leaves layer by layer. So a chunk is computed as two shorter ones are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.engine.inputs import bucketed
from pyggml_dflash.errors import UsageError
from pyggml_dflash.ggml.device import DeviceKind
from pyggml_dflash.options import EngineOptions
from pyggml_dflash.plan.split import SplitPlan

LOG: Final = logging.getLogger(__name__)
MIN_ROWS: Final = 1024  # of a chunk that is divided: half as many rows keep a device busy
# Chunks of 2,048 rows take 0.91 of the time where two GPUs share the layers, 1.09 beside a CPU with experts:
# docs/measurements/h200-two-gpus.md, h200-host-experts.md.
AUTO_ROWS: Final = 2048
TILE: Final = 256

Form = Callable[[int, int, int], str]  # of a forward, by rows behind it, its rows and cache rows


@dataclass(frozen=True, slots=True)
class PromptStreams:
    """How chunks are divided into forwards."""

    n: int = 1
    least: int = MIN_ROWS  # rows of a chunk that is divided
    copied_from: int = 0  # rows from which experts are copied to the target, which then works alone; 0: never

    def rows(self, n_tokens: int) -> tuple[int, ...]:
        """Rows of the forwards of a chunk: all but the last have whole tiles."""
        if self.n == 1 or n_tokens < self.least or 0 < self.copied_from <= n_tokens:
            return (n_tokens,)
        first = -(-n_tokens // (2 * TILE)) * TILE
        return first, n_tokens - first

    def most_rows(self, chunk: int) -> tuple[int, ...]:
        """The most rows that each of the forwards of chunks of up to `chunk` rows may have."""
        divided = min(chunk, self.copied_from - 1) if self.copied_from else chunk
        if len(self.rows(divided)) == 1:
            return (chunk,)
        halves = (self.rows(n) for n in (divided, max(self.least, divided // (2 * TILE) * 2 * TILE)))
        first, second = (max(rows) for rows in zip(*halves, strict=True))
        return max(first, chunk if chunk > divided else self.least - 1), second

    def keys(self, key: GraphKey, n_past: int, form: Form) -> tuple[GraphKey, ...]:
        """The forwards of a chunk behind `n_past`; unless all rows have logits, only the last has some."""
        rows = self.rows(key.n_tokens)
        if len(rows) == 1:
            return (key,)
        keys = []
        for i, n in enumerate(rows):
            n_kv = bucketed(n_past + n)
            is_last = i == len(rows) - 1
            output = key.output if is_last or key.output == "all" else "none"
            keys.append(replace(key, n_tokens=n, n_kv=n_kv, output=output, form=form(n_past, n, n_kv)))
            n_past += n
        return tuple(keys)


ONE_STREAM: Final = PromptStreams()


def choose_streams(
    options: EngineOptions, split: SplitPlan, kinds: Collection[DeviceKind], copied_from: int
) -> PromptStreams:
    """As asked; of itself two for large chunks where GPUs share the layers. `kinds`: of the devices;
    `copied_from`: as in `PromptStreams`."""
    if isinstance(options.prompt_streams, str):
        pays = split.kind == "layers" and len(split.devices) > 1 and set(kinds) == {"gpu"}
        return PromptStreams(2, least=AUTO_ROWS) if pays else ONE_STREAM
    if options.prompt_streams > 1 and len(split.devices) == 1:
        raise UsageError(
            f"prompt_streams is {options.prompt_streams}, but {split.devices[0]} has the whole model: "
            "streams take turns on several devices"
        )
    return PromptStreams(options.prompt_streams, copied_from=copied_from)


def note_undivided(streams: PromptStreams, rows: int) -> None:
    """Tell whoever asked for two where forwards of at most `rows` rows leave nothing to divide."""
    if streams.n == 1 or len(streams.rows(rows)) > 1 or streams.least != MIN_ROWS:
        return
    if rows < MIN_ROWS:
        why = f"prompts are read {rows} rows at a time: from {MIN_ROWS} rows on they are divided"
    else:
        why = f"from {streams.copied_from} rows on experts are copied to the target, which then works alone"
    LOG.warning("prompt_streams is %d, but %s", streams.n, why)
