"""The way from a script to the inside of an engine, for figures that the public face does not give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pyggml_dflash import Engine
from pyggml_dflash.arch.base import Capture, StateUpdate
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.drafting import Drafter
from pyggml_dflash.engine.graphs import Forwards, Recording
from pyggml_dflash.ggml.device import Backend
from pyggml_dflash.ggml.graph import StepGraph
from pyggml_dflash.ggml.tensor import Tensor

T = TypeVar("T")


def on_core(engine: Engine, function: Callable[[EngineCore], T]) -> T:
    """Run `function` on the engine's thread, which alone may touch the core, and return its value."""
    return engine._thread.call(lambda core, _: function(core))


def forbidden_of(engine: Engine) -> npt.NDArray[np.int64] | None:
    """Ids that are never chosen: vocabulary rows without a token."""
    return engine._loaded.forbidden_ids


def forwards_of(core: EngineCore) -> Forwards:
    """What runs the engine's own forwards."""
    return core._forwards


def drafter_of(core: EngineCore) -> Drafter | None:
    """What drafts, if anything does."""
    return core._drafters[0] if core._drafters else None


def backend_of(core: EngineCore) -> Backend:
    """Where the target computes."""
    return core._forwards._backend


def state_of(core: EngineCore) -> dict[str, Tensor]:
    """The state tensors of every slot, by name."""
    return core._slots.tensors


@contextmanager
def more_forwards(core: EngineCore, update: StateUpdate, max_width: int) -> Iterator[Forwards]:
    """Forwards beside the engine's own, on the same weights and slots, of another way to take rows back."""
    own = core._forwards
    capture = Capture() if own.recording is None else own.recording.capture
    with closing(
        Forwards(
            own._backend,
            own._ledger,
            own.model,
            own._slots,
            chunk=max_width,
            host=None if own.gather is None else own.gather._host,
            recording=Recording(capture=capture, update=update, max_width=max_width),
        )
    ) as forwards:
        yield forwards


def last_graph(forwards: Forwards) -> StepGraph:
    """The kept graph that ran last."""
    return next(reversed(forwards._cache._kept.values()))


def compute(graph: StepGraph) -> None:
    """Run a kept graph on the inputs that are there, and wait; its outputs stay on the device."""
    graph._compute(graph._stream, graph._graph)
    graph._synchronize(graph._stream)
