"""What a user may choose, as frozen data that is checked when it is made. Layer 0.

A value is used as given or refused with a `UsageError` that quotes it; nothing here is changed
silently. `None` or 'auto' means that the engine chooses and reports what it chose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from pyggml_dflash.errors import UsageError

KVType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
Auto = Literal["auto"]
Switch = Literal["auto", "on", "off"]

KV_TYPES: Final[tuple[str, ...]] = get_args(KVType)
MAX_SEED: Final = 2**63 - 1


def _refuse(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{name} is {value!r}; {wanted}")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    wanted = f"it must be a whole number of at least {low}" + ("" if high is None else f" and at most {high}")
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        raise _refuse(name, value, wanted)


def _check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    wanted = f"it must be a number {'above' if above else 'from'} {low:g}" + (
        "" if math.isinf(high) else f" up to {high:g}"
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refuse(name, value, wanted)
    if value < low or value > high or (above and value == low):
        raise _refuse(name, value, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine is opened. Every field has a flag of the same name on the command line."""

    model: Path | None = None  # None: the small model that ships with the package
    max_ctx: int | None = None  # tokens per slot; None: the trained context, at most 8192
    chunk: int | Auto = "auto"  # prompt rows per prefill forward
    device: str | None = None  # as `dflash devices` lists them; None: the first GPU, else the CPU
    threads: int | None = None  # CPU threads that compute; None: one per physical core
    cache_type_k: KVType = "f16"
    cache_type_v: KVType = "f16"
    flash_attn: Switch = "auto"
    repack: Switch = "auto"  # weights in ggml's repacked CPU layouts
    nfc: bool = True  # Unicode NFC before tokenizing where the model was trained so; False: as llama.cpp

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, Path):
            raise _refuse("model", self.model, "it must be a pathlib.Path or None")
        if self.max_ctx is not None:
            _check_int("max_ctx", self.max_ctx, 1, 2**31 - 1)
        if self.chunk != "auto":
            _check_int("chunk", self.chunk, 1, 32768)
        if self.threads is not None:
            _check_int("threads", self.threads, 1, 512)
        for name in ("cache_type_k", "cache_type_v"):
            if getattr(self, name) not in KV_TYPES:
                raise _refuse(name, getattr(self, name), f"it must be one of {', '.join(KV_TYPES)}")
        for name in ("flash_attn", "repack"):
            if getattr(self, name) not in get_args(Switch):
                raise _refuse(name, getattr(self, name), "it must be 'auto', 'on' or 'off'")
        if self.flash_attn == "off" and self.cache_type_v in ("q8_0", "q4_0"):
            raise _refuse(
                "cache_type_v", self.cache_type_v, "without flash attention it must be f32, f16 or bf16"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How a token is chosen from logits. The defaults are greedy: the same prompt gives the same text."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # keep the k best; 0: all
    top_p: float = 1.0  # keep the smallest set whose probability reaches p; 1: all
    min_p: float = 0.0  # drop what is below min_p times the best probability; 0: none
    repetition_penalty: float = 1.0  # over prompt and answer: divides positive, multiplies negative logits
    frequency_penalty: float = 0.0  # over the answer, per occurrence
    presence_penalty: float = 0.0  # over the answer, once per token seen
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int | None = None  # None: a fresh one per request, reported in the result

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 100)
        _check_int("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 100, above=True)
        _check_number("frequency_penalty", self.frequency_penalty, -100, 100)
        _check_number("presence_penalty", self.presence_penalty, -100, 100)
        if not isinstance(self.logit_bias, Mapping):
            raise _refuse("logit_bias", self.logit_bias, "it must map token ids to numbers")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias token", token, 0)
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or math.isnan(bias):
                raise _refuse(f"logit_bias of token {token}", bias, "it must be a number")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)

    @property
    def greedy(self) -> bool:
        """True if the best token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """True if penalties or biases move logits before the choice."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)
