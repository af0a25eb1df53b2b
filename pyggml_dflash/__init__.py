"""Run Qwen3.5-family and other GGUF language models on ggml: `Engine.open("model.gguf")`.

Names are imported when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggml_dflash.api import (
        ConvertedDraft,
        DeviceInfo,
        Engine,
        EngineInfo,
        FitReport,
        Score,
        Snapshots,
        TextStream,
        convert_draft,
        devices,
        fit_report,
        inspect_model,
    )
    from pyggml_dflash.batch import Batch, BatchRequest, BatchResult
    from pyggml_dflash.errors import (
        BackendError,
        Cancelled,
        ContextFitError,
        ContextOverflowError,
        DamagedFileError,
        DeviceLostError,
        DeviceMemoryError,
        DflashError,
        EngineClosed,
        EngineParked,
        ModelFileError,
        QueueFullError,
        SnapshotError,
        UnsupportedModelError,
        UsageError,
    )
    from pyggml_dflash.measures import DeviceMemory, Histogram, PoolReport
    from pyggml_dflash.options import EngineOptions, SamplingOptions
    from pyggml_dflash.requests import (
        Constraint,
        EngineStats,
        FolderStats,
        GenerationRequest,
        GenerationResult,
        Progress,
        PromptReuse,
        ReasoningBlock,
        RequestCounts,
        RequestState,
        SlotInfo,
        SnapshotStats,
        StoredPrefix,
        TextPiece,
        Timings,
        TokenLogprob,
        TrimStats,
        Usage,
    )

__version__ = "0.1.0"

_MODULES = {
    "api": (
        "ConvertedDraft",
        "DeviceInfo",
        "Engine",
        "EngineInfo",
        "FitReport",
        "Score",
        "Snapshots",
        "TextStream",
        "convert_draft",
        "devices",
        "fit_report",
        "inspect_model",
    ),
    "batch": ("Batch", "BatchRequest", "BatchResult"),
    "errors": (
        "BackendError",
        "Cancelled",
        "ContextFitError",
        "ContextOverflowError",
        "DamagedFileError",
        "DeviceLostError",
        "DeviceMemoryError",
        "DflashError",
        "EngineClosed",
        "EngineParked",
        "ModelFileError",
        "QueueFullError",
        "SnapshotError",
        "UnsupportedModelError",
        "UsageError",
    ),
    "measures": ("DeviceMemory", "Histogram", "PoolReport"),
    "options": ("EngineOptions", "SamplingOptions"),
    "requests": (
        "Constraint",
        "EngineStats",
        "FolderStats",
        "GenerationRequest",
        "GenerationResult",
        "Progress",
        "PromptReuse",
        "ReasoningBlock",
        "RequestCounts",
        "RequestState",
        "SlotInfo",
        "SnapshotStats",
        "StoredPrefix",
        "TextPiece",
        "Timings",
        "TokenLogprob",
        "TrimStats",
        "Usage",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BackendError",
    "Batch",
    "BatchRequest",
    "BatchResult",
    "Cancelled",
    "Constraint",
    "ContextFitError",
    "ContextOverflowError",
    "ConvertedDraft",
    "DamagedFileError",
    "DeviceInfo",
    "DeviceLostError",
    "DeviceMemory",
    "DeviceMemoryError",
    "DflashError",
    "Engine",
    "EngineClosed",
    "EngineInfo",
    "EngineOptions",
    "EngineParked",
    "EngineStats",
    "FitReport",
    "FolderStats",
    "GenerationRequest",
    "GenerationResult",
    "Histogram",
    "ModelFileError",
    "PoolReport",
    "Progress",
    "PromptReuse",
    "QueueFullError",
    "ReasoningBlock",
    "RequestCounts",
    "RequestState",
    "SamplingOptions",
    "Score",
    "SlotInfo",
    "SnapshotError",
    "SnapshotStats",
    "Snapshots",
    "StoredPrefix",
    "TextPiece",
    "TextStream",
    "Timings",
    "TokenLogprob",
    "TrimStats",
    "UnsupportedModelError",
    "Usage",
    "UsageError",
    "__version__",
    "convert_draft",
    "devices",
    "fit_report",
    "inspect_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
