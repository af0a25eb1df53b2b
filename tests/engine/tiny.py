"""The small models of these tests, and opening them: on the CPU, with one thread, decoding plainly.

Two threads on a busy machine wait for each other a thousand times as long as these models compute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pyggml_dflash import Engine

MODELS: Final = Path(__file__).parents[1] / "data" / "models"
LLAMA: Final = MODELS / "llama-tiny-Q8_0.gguf"  # 640 tokens, trained for 2048
QWEN35: Final = MODELS / "qwen35-tiny-Q8_0.gguf"  # hybrid, with an MTP block; 768 tokens, trained for 4096
QWEN3: Final = MODELS / "qwen3-tiny-Q4_K_M.gguf"  # some weights are repacked when loaded; trained for 2048
PATIENCE_S: Final = 60.0  # after this, waiting is called hanging; nothing here takes a second


def opened(model: Path | None, **options: Any) -> Engine:
    """An engine with one thread on the CPU, without drafts unless asked for, and other options as given."""
    spec = "auto" if "draft" in options else "off"
    return Engine.open(model, **{"device": "CPU", "threads": 1, "spec": spec, **options})


def prompt(n: int, *, seed: int = 1) -> list[int]:
    """`n` token ids that every tiny model has, other ones for another seed."""
    return [(seed * 7919 + 31 * i * i + 17 * i) % 600 for i in range(n)]
