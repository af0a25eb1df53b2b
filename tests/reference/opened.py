"""Opens a model for tests that look below `Engine`: on the CPU, with one thread unless asked otherwise.

One thread is the fastest for models this small, and does not wait for another on a busy machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pyggml_dflash.arch import architecture_of
from pyggml_dflash.engine.assembly import has_tiles, settle
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.graphs import Forwards, Model
from pyggml_dflash.engine.loader import load
from pyggml_dflash.ggml.device import Backend, choose_device
from pyggml_dflash.ggml.gguf import GgufFile
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.model.weights import LoadedWeights, check_tensors, place_weights
from pyggml_dflash.options import EngineOptions, KVType
from pyggml_dflash.state.slot import SlotTable

Floats = NDArray[np.float32]
OnOff = Literal["on", "off"]


def on_the_cpu(
    model: Path,
    *,
    max_ctx: int | None = None,
    chunk: int = 64,
    flash_attn: OnOff = "on",
    repack: OnOff = "on",
    cache_type_k: KVType = "f32",
    cache_type_v: KVType = "f32",
    threads: int = 1,
) -> EngineOptions:
    """Options with nothing left to choose, caches in single precision."""
    return EngineOptions(
        model=model,
        max_ctx=max_ctx,
        chunk=chunk,
        device="CPU",
        threads=threads,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attn=flash_attn,
        repack=repack,
    )


@contextmanager
def open_core(options: EngineOptions) -> Iterator[EngineCore]:
    """The core of a loaded model without a drafter, on this thread."""
    core = load(replace(options, spec="off"), lambda _: None).core
    try:
        yield core
    finally:
        core.close()


def prefill(core: EngineCore, tokens: list[int]) -> Floats:
    """Logits after a prompt, which the first slot then holds."""
    slot = core.slots[0]
    slot.reset()
    for start in range(0, len(tokens), core.chunk):
        part = tokens[start : start + core.chunk]
        logits = core.prefill(slot, part, last=start + len(part) == len(tokens))
    assert logits is not None
    return logits


def continued(core: EngineCore, prompt: list[int], answer: list[int]) -> Iterator[Floats]:
    """The logits that choose each token of `answer`: prompt in chunks, then the answer decoded."""
    yield prefill(core, prompt)
    for token in answer[:-1]:
        yield core.decode(core.slots[0], token).copy()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a core is made of, for tests of one part."""

    backend: Backend
    ledger: Ledger
    model: Model
    slots: SlotTable
    forwards: Forwards

    @property
    def state(self) -> dict[str, Any]:
        """State tensors by name."""
        return self.slots.tensors


@contextmanager
def assembled(options: EngineOptions, *, n_slots: int = 1) -> Iterator[Parts]:
    """The parts of a loaded model, with as many slots as asked for."""
    assert options.model is not None
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile.open(options.model))
        name, architecture = architecture_of(file)
        config = architecture.read_config(file, name)
        specs = check_tensors(file, architecture.tensors(config, file))
        settings = settle(options, architecture, config)
        ledger = Ledger()
        backend = Backend(choose_device(options.device), threads=options.threads)
        stack.callback(backend.close)
        placements = place_weights(file, specs, backend, repack=options.repack != "off")
        weights = LoadedWeights(file, placements, backend, ledger)
        stack.callback(weights.close)
        slots = SlotTable(backend, ledger, settings.layout, n_slots)
        stack.callback(slots.close)
        tiles = has_tiles(options, backend)
        model = Model(architecture, config, weights, options.flash_attn != "off", tiles=tiles)
        forwards = Forwards(backend, ledger, model, slots, chunk=settings.chunk, host=None)
        stack.callback(forwards.close)
        yield Parts(backend, ledger, model, slots, forwards)
