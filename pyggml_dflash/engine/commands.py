"""What an engine's thread is asked for. Layer 6."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.forced import ForcedText
from pyggml_dflash.engine.handle import RequestHandle
from pyggml_dflash.engine.loaded import Loaded
from pyggml_dflash.requests import ProgressCallback

T = TypeVar("T")
IsCancelled = Callable[[], bool]


@dataclass(slots=True)
class Call(Generic[T]):
    """A function to run on the engine's thread between steps; it asks now and then whether to go on."""

    function: Callable[[EngineCore, IsCancelled], T]
    when_parked: bool = False  # it needs no model
    future: Future[T] = field(default_factory=Future)
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for the value."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Ask the function to stop."""
        self._stop.set()


@dataclass(slots=True)
class Park:
    """Give the model's memory back, once nothing runs any more."""

    cancel: bool  # what runs and waits
    future: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class Unpark:
    """Load what was parked."""

    progress: ProgressCallback | None
    future: Future[Loaded] = field(default_factory=Future)


class Wake:
    """A command that says nothing: somebody cancelled something."""


WAKE: Final = Wake()
Queued = RequestHandle | ForcedText[Any]
Command = Queued | Call[Any] | Park | Unpark | Wake | None  # None: close
