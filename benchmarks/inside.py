"""The way from a script to the inside of an engine, for figures that the public face does not give."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pyggml_dflash import Engine
from pyggml_dflash.engine.core import EngineCore

T = TypeVar("T")


def on_core(engine: Engine, function: Callable[[EngineCore], T]) -> T:
    """Run `function` on the engine's thread, which alone may touch the core, and return its value."""
    return engine._thread.call(lambda core, _: function(core))
