"""What a user may choose, as frozen data that is checked when it is made. Layer 0.

A value is used as given or refused with a `UsageError` that quotes it; nothing here is changed
silently. `None` or 'auto' means that the engine chooses and reports what it chose.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from pyggml_dflash.errors import UsageError, quoted

KVType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
Auto = Literal["auto"]
Switch = Literal["auto", "on", "off"]
Spec = Literal["auto", "off", "dflash", "mtp"]
Split = Literal["auto", "none", "experts", "layers"]
LinkType = Literal["f32", "f16"]
# How an MTP block of qwen4exp reads the trunk's streams, where published programs differ: normalised all
# together, or each on its own; llama.cpp does the latter and pairs the first token with a row of zeros.
MtpConvention = Literal["all-streams", "per-stream", "llama.cpp"]
DraftCausal = Literal["auto", "none", "swa", "all"]
DraftType = Literal["keep", "f32", "f16", "bf16", "q8_0"]
HostMemory = Literal["pageable", "pinned"]

KV_TYPES: Final[tuple[str, ...]] = get_args(KVType)
TRIM_VARIABLE: Final = "DFLASH_PREFILL_POOL_TRIM_TOKENS"
MAX_SEED: Final = 2**63 - 1
MAX_COUNT: Final = 2**31 - 1
MAX_BIAS: Final = sys.float_info.max
MAX_WIDTH: Final = 16  # rows of a verify forward
MIN_STREAM_ROWS: Final = 128  # more than decode and verify forwards have, so that only prompts can differ
MAX_THREADS: Final = 512
MAX_TIMEOUT_S: Final = 10**6
MAX_PREFIXES: Final = 63  # states in memory
# Numbers that choose tokens: the least, the most, and whether the least itself is left out.
SAMPLING_RANGES: Final[Mapping[str, tuple[float, float, bool]]] = {
    "temperature": (0, 100, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (0, 100, True),
    "frequency_penalty": (-100, 100, False),
    "presence_penalty": (-100, 100, False),
}


def refusal(name: str, value: object, wanted: str) -> UsageError:
    """The error for a value that cannot be used."""
    return UsageError(f"{name} is {quoted(value)}; {wanted}")


def check_int(
    name: str, value: object, low: int, high: int | None = MAX_COUNT, *, otherwise: str = ""
) -> None:
    """Refuse what is no whole number within [low, high]; bools and NumPy's integers are none.

    `otherwise`: what else works, for the message.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        most = "" if high is None else f" and at most {high}"
        raise refusal(name, value, f"it must be a whole number of at least {low}{most}{otherwise}")


def check_int_or_auto(name: str, value: object, low: int, high: int | None = MAX_COUNT) -> None:
    """Refuse what is neither 'auto' nor a whole number within [low, high]."""
    if not isinstance(value, str) or value != "auto":
        check_int(name, value, low, high, otherwise=", or 'auto'")


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Refuse what is no finite number within [low, high], or within (low, high] if `above`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        start = "above" if above else "from"
        raise refusal(name, value, f"it must be a number {start} {low:g} up to {high:g}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is none of these strings."""
    if not isinstance(value, str) or value not in choices:
        raise refusal(name, value, f"it must be one of {', '.join(choices)}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise refusal(name, value, "it must be True or False")


def check_text(name: str, value: object) -> None:
    """Refuse what is no string."""
    if not isinstance(value, str):
        raise refusal(name, value, "it must be text")


def check_path(name: str, value: object) -> None:
    """Refuse what is neither None nor a `pathlib.Path`."""
    if value is not None and not isinstance(value, Path):
        raise refusal(name, value, "it must be a pathlib.Path or None")


def check_callback(name: str, value: object) -> None:
    """Refuse what is neither None nor can be called."""
    if value is not None and not callable(value):
        raise refusal(name, value, "it must be a function or None")


def check_spec_width(value: object) -> None:
    """Refuse what is neither 'auto' nor a number of rows that a verify forward may have."""
    check_int_or_auto("spec_width", value, 2, MAX_WIDTH)


def check_stream_experts(value: object) -> None:
    """Refuse what is neither 'auto', nor 0, nor more rows than those of decoded tokens."""
    never = isinstance(value, int) and not isinstance(value, bool) and value == 0
    if not never and (not isinstance(value, str) or value != "auto"):
        check_int("stream_experts", value, MIN_STREAM_ROWS, otherwise=", or 0 for never, or 'auto'")


def as_path(name: str, value: object) -> Path:
    """The path that a string or a path-like object names; empty text names none, not the current folder."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise refusal(name, value, "it must be the path of a file")
    return Path(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """What a fit leaves free of a device: a part of what is free there, or a number of bytes."""

    part: float = 0.1
    n_bytes: int | None = None

    @classmethod
    def parse(cls, text: object) -> Margin:
        """'10%' or '7.5%' of what is free, or MiB as in '512' and '512MiB'."""
        given = text if isinstance(text, str) else ""
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(%|MiB)?", given)
        if match is None or (match[2] == "%" and float(match[1]) > 90):
            raise refusal("fit_margin", text, "it must be a part up to 90% as in '10%', or MiB as in '512'")
        if match[2] == "%":
            return cls(part=float(match[1]) / 100)
        return cls(n_bytes=int(float(match[1]) * 2**20))

    def of(self, available: int, *, floor: int = 0) -> int:
        """Bytes to leave free of `available`; a part is at least `floor` bytes."""
        if self.n_bytes is not None:
            return self.n_bytes
        return max(int(available * self.part), floor if self.part else 0)


def parse_trim_interval(text: str) -> int | Auto | None:
    """Tokens between two trims, 0 for none, or 'auto'; None for anything else.

    Decimal digits up to 2**31 - 1 with blanks around them; nothing at all, and 'off', mean none.
    """
    text = text.strip(" \t")
    if text == "auto":
        return "auto"
    if text in ("", "off"):
        return 0
    if not re.fullmatch(r"[0-9]{1,40}", text) or int(text) > MAX_COUNT:
        return None
    return int(text)


def split_max_ctx(max_ctx: int | str) -> tuple[bool, int | None]:
    """Whether a context is to be found, and the number given: the context itself, or the most to try."""
    if isinstance(max_ctx, int):
        return False, max_ctx
    _, _, most = max_ctx.partition(":")
    return True, int(most) if most else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine is opened. Every field has a flag of the same name on the command line."""

    model: Path | None = None  # None: the small model that ships with the package
    max_ctx: int | str | None = None  # per slot; 'auto', 'auto:N': what fits, up to N; None: at most 8192
    min_ctx: int | None = None  # the least that 'auto' may choose; None: 4096, or 256 for short models
    slots: int = 1  # sequences at a time
    queue_limit: int | None = None  # most requests that wait for a slot; more are refused; None: any number
    prefill_share: float = 1.0  # most of the time that prompts may take while others are answered; 1: any
    admission_coalesce_ms: int = 0  # how long an idle engine waits for more requests when one comes
    allow_batch_variance: bool = False  # decode slots together even where a row is then rounded otherwise
    chunk: int | Auto = "auto"  # prompt rows per prefill forward
    device: str | None = None  # as `dflash devices` lists them; None: the roomiest GPU, else the CPU
    devices: tuple[str, ...] = ()  # that share the layers, the target first; or the one device
    split: Split = "auto"  # auto: one device if the model fits there, else what fits
    tensor_split: tuple[float, ...] = ()  # parts of the layers, one for each of `devices`; (): by free memory
    expert_device: str | None = None  # for the routed experts, beside `device`
    link_type: LinkType = "f32"  # of a prompt's rows between devices; f16 sends half the bytes and rounds
    prompt_streams: int | Auto = "auto"  # 1 or 2 forwards of a chunk, in turns on several devices
    kv_overflow_device: str | None = None  # for keys and values of layers that `device` has no room for
    expert_placement: Path | None = None  # counts of `dflash route-stats`: what is picked most is copied
    expert_budget_mib: int = 8192  # most memory of the target for such copies
    stream_experts: int | Auto = "auto"  # fewest prompt rows for which `device` copies host experts; 0: never
    expert_memory: HostMemory = "pageable"  # of experts that are streamed; pinned: copied at full speed
    worker_timeout_s: int = 600  # most seconds that a worker may leave an answer out; 0: any time
    device_cap: Mapping[str, int] = field(default_factory=dict)  # device name -> most bytes to hold there
    device_reserve_mib: int = 0  # memory of the device that is taken and left alone
    fit_margin: str = "10%"  # left free by a fit: a part of what is free, or MiB as in '512'
    threads: int | None = None  # CPU threads that compute; None: one per physical core
    cache_type_k: KVType = "f16"
    cache_type_v: KVType = "f16"
    flash_attn: Switch = "auto"
    repack: Switch = "auto"  # weights in ggml's repacked CPU layouts
    draft: Path | None = None  # made for the model: GGUF file, published folder, or its MTP block as a file
    draft_causal: DraftCausal = "auto"  # layers of a DFlash draft whose rows see no later ones
    spec: Spec = "auto"  # the drafter; auto: the draft given or shipped with the model, else its MTP block
    spec_width: int | Auto = "auto"  # rows of a verify forward; auto: what measured cost and acceptance say
    mtp_convention: MtpConvention = "all-streams"  # for qwen4exp; changes acceptance, never the text
    trim_interval: int | Auto | None = None  # prompt tokens between two pool trims; None: the environment's
    prefix_cache_max_mib: int | Auto = "auto"  # most memory of stored states; 0: none are stored
    prefix_cache_entries: int = 32  # most states in memory
    snapshot_memory: HostMemory = "pageable"  # pinned: a discrete GPU copies states at full speed
    kv_cache_dir: Path | None = None  # a folder in which states outlive the process
    kv_cache_budget: int = 4096  # most MiB of files there
    kv_cache_min_tokens: int = 512  # shorter prefixes are not written there
    chat_template: Path | None = None  # a Jinja file in place of the model's own
    nfc: bool = True  # Unicode NFC before tokenizing where the model was trained so; False: as llama.cpp

    def __post_init__(self) -> None:
        check_path("model", self.model)
        self._check_memory()
        check_int_or_auto("chunk", self.chunk, 1, 32768)
        if self.device is not None and not isinstance(self.device, str):
            raise refusal("device", self.device, "it must be a device's name or None")
        self._check_split()
        check_number("prefill_share", self.prefill_share, 0, 1)
        check_int("admission_coalesce_ms", self.admission_coalesce_ms, 0, 1000)
        if self.threads is not None:
            check_int("threads", self.threads, 1, MAX_THREADS)
        check_choice("cache_type_k", self.cache_type_k, KV_TYPES)
        check_choice("cache_type_v", self.cache_type_v, KV_TYPES)
        check_choice("flash_attn", self.flash_attn, get_args(Switch))
        check_choice("repack", self.repack, get_args(Switch))
        check_flag("allow_batch_variance", self.allow_batch_variance)
        check_flag("nfc", self.nfc)
        check_path("chat_template", self.chat_template)
        self._check_speculation()
        self._check_stored()
        if self.flash_attn == "off" and self.cache_type_v in ("q8_0", "q4_0"):
            raise refusal(
                "cache_type_v", self.cache_type_v, "without flash attention it must be f32, f16 or bf16"
            )

    def _check_memory(self) -> None:
        if isinstance(self.max_ctx, str):
            if not re.fullmatch(r"auto(:0*[1-9][0-9]{0,9})?", self.max_ctx):
                raise refusal("max_ctx", self.max_ctx, "it must be a number of tokens, 'auto' or 'auto:N'")
        elif self.max_ctx is not None:
            check_int("max_ctx", self.max_ctx, 1, otherwise=", or 'auto'")
        if self.min_ctx is not None:
            check_int("min_ctx", self.min_ctx, 1)
        check_int("slots", self.slots, 1, 64)
        if self.queue_limit is not None:
            check_int("queue_limit", self.queue_limit, 0)
        check_int("device_reserve_mib", self.device_reserve_mib, 0)
        if not isinstance(self.device_cap, Mapping):
            raise refusal("device_cap", self.device_cap, "it must map device names to bytes")
        for name, n_bytes in self.device_cap.items():
            if not isinstance(name, str):
                raise refusal("device_cap device", name, "it must be a device's name")
            check_int(f"device_cap of {name}", n_bytes, 0, None)
        object.__setattr__(self, "device_cap", dict(self.device_cap))  # what is checked must not change
        Margin.parse(self.fit_margin)
        if self.trim_interval is not None:
            check_int_or_auto("trim_interval", self.trim_interval, 0)

    def _check_split(self) -> None:
        check_choice("split", self.split, get_args(Split))
        check_choice("link_type", self.link_type, get_args(LinkType))
        for option in ("devices", "tensor_split"):
            if not isinstance(getattr(self, option), tuple):
                raise refusal(
                    option, getattr(self, option), "it must be a tuple, with an entry for each device"
                )
        check_int_or_auto("prompt_streams", self.prompt_streams, 1, 2)
        for name in self.devices:
            if not isinstance(name, str) or not name:
                raise refusal("devices", name, "it must be a device's name")
        for option in ("expert_device", "kv_overflow_device"):
            if getattr(self, option) is not None and not isinstance(getattr(self, option), str):
                raise refusal(option, getattr(self, option), "it must be a device's name or None")
        check_path("expert_placement", self.expert_placement)
        check_int("expert_budget_mib", self.expert_budget_mib, 0)
        check_stream_experts(self.stream_experts)
        check_choice("expert_memory", self.expert_memory, get_args(HostMemory))
        check_int("worker_timeout_s", self.worker_timeout_s, 0, MAX_TIMEOUT_S)
        for part in self.tensor_split:
            check_number("tensor_split", part, 0, 1e6, above=True)

    def _check_speculation(self) -> None:
        check_choice("spec", self.spec, get_args(Spec))
        check_choice("mtp_convention", self.mtp_convention, get_args(MtpConvention))
        check_choice("draft_causal", self.draft_causal, get_args(DraftCausal))
        check_path("draft", self.draft)
        if self.spec == "dflash" and self.draft is None and self.model is not None:
            raise refusal("spec", self.spec, "it needs a draft")
        check_spec_width(self.spec_width)

    def _check_stored(self) -> None:
        check_int_or_auto("prefix_cache_max_mib", self.prefix_cache_max_mib, 0)
        check_int("prefix_cache_entries", self.prefix_cache_entries, 1, MAX_PREFIXES)
        check_choice("snapshot_memory", self.snapshot_memory, get_args(HostMemory))
        check_path("kv_cache_dir", self.kv_cache_dir)
        if self.kv_cache_dir is not None and not self.stores_states:
            raise refusal("prefix_cache_max_mib", 0, "it must be more with a kv_cache_dir, or 'auto'")
        check_int("kv_cache_budget", self.kv_cache_budget, 1)
        check_int("kv_cache_min_tokens", self.kv_cache_min_tokens, 1)

    @property
    def stores_states(self) -> bool:
        """True if prompts may continue stored states."""
        return self.prefix_cache_max_mib != 0


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
    seed: int | None = None  # None: a fresh one per request, reported unless drafts are drawn with it

    def __post_init__(self) -> None:
        for name, (low, high, above) in SAMPLING_RANGES.items():
            check_number(name, getattr(self, name), low, high, above=above)
        check_int("top_k", self.top_k, 0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.logit_bias, Mapping):
            raise refusal("logit_bias", self.logit_bias, "it must map token ids to numbers")
        for token, bias in self.logit_bias.items():
            check_int("logit_bias token", token, 0, None)  # the vocabulary is not known yet
            if not (isinstance(bias, float) and math.isinf(bias)):  # infinite ones force and forbid a token
                check_number(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # what is checked must not change

    @property
    def greedy(self) -> bool:
        """True if the best token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """True if penalties or biases move logits before the choice."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)
