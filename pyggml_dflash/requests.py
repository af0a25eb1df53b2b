"""What a caller submits and gets back, as frozen data. Layer 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from pyggml_dflash.errors import UsageError
from pyggml_dflash.measures import DeviceMemory, Histogram, PoolReport
from pyggml_dflash.options import (
    Auto,
    SamplingOptions,
    Spec,
    check_choice,
    check_flag,
    check_int,
    check_spec_width,
    check_text,
    refusal,
)

SWITCHED_OFF: Final = "speculation is switched off"
NOTHING_TO_DRAFT_WITH: Final = "no draft was given and the file has no MTP block"

MAX_CONSTRAINT_CHARS: Final = 1 << 18  # longer ones take seconds to compile

FinishReason = Literal["stop", "length", "cancelled"]
Tier = Literal["memory", "disk"]
ConstraintKind = Literal["json_schema", "json_object", "regex", "grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an answer must be: text that a schema or a grammar describes from its beginning to its end.

    A regular expression is that of the whole answer. A grammar is Lark with a rule `start`, or GBNF with
    `root`.
    """

    kind: ConstraintKind
    text: str = ""  # the schema, the expression or the grammar; nothing for 'json_object'

    def __post_init__(self) -> None:
        check_choice("constraint kind", self.kind, get_args(ConstraintKind))
        check_text(self.kind, self.text)
        if self.kind == "json_object":
            if self.text:
                raise refusal("json_object", self.text, "it has no text of its own; use json_schema")
            return
        if not self.text.strip(" \t\r\n") and self.kind != "regex":
            raise refusal(self.kind, self.text, "it must not be empty")
        if len(self.text) > MAX_CONSTRAINT_CHARS:
            n = len(self.text)
            raise UsageError(f"{self.kind} has {n} characters; at most {MAX_CONSTRAINT_CHARS} are compiled")
        if any("\ud800" <= char <= "\udfff" for char in self.text):
            raise refusal(self.kind, self.text, "it has a lone surrogate, which is no character")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Constraint:
        """JSON that a schema describes."""
        try:
            return cls(kind="json_schema", text=json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise refusal("json_schema", schema, f"it cannot be written as JSON: {error}") from error


def check_constraint(value: object) -> None:
    """Refuse what is no constraint."""
    if not isinstance(value, Constraint):
        raise refusal("constraint", value, "it must be a Constraint")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBlock:
    """Where an answer may reason: between two tags, at its beginning.

    A constraint holds behind the block. `budget`: tokens of reasoning after which the block is closed; -1 for
    any number.
    """

    opens: str
    closes: str
    is_open: bool  # the prompt has opened it; else the model may
    budget: int = -1

    def __post_init__(self) -> None:
        for name, tag in (("opens", self.opens), ("closes", self.closes)):
            if not isinstance(tag, str) or not tag or tag != tag.strip():
                raise refusal(name, tag, "it must be a tag such as <think>, with no space around it")
        check_flag("is_open", self.is_open)
        check_int("reasoning_budget", self.budget, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it."""

    tokens: tuple[int, ...]
    max_tokens: int | None = None  # None: up to the end of the context
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()  # the answer ends before the earliest of these
    logprobs: int | None = None  # alternatives reported per token, 0 for the chosen one only
    ignore_eos: bool = False
    spec: Spec | None = None  # what drafts tokens, as the engine can; None: as it was opened
    spec_width: int | Auto | None = None  # rows of a verify forward; None: as the engine was opened
    continues_text: bool = True  # the answer goes on where the prompt's text stops; False: a turn of its own
    cache_prompt: bool = True  # continue a stored state, and store one; False: neither
    keep_head: bool = False  # many conversations share the first turn, so its state is kept longer
    constraint: Constraint | None = None  # what the answer must be, behind its reasoning
    reasoning_block: ReasoningBlock | None = None  # the one that the answer begins with or may begin with

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, tuple):
            raise refusal("tokens", self.tokens, "it must be a tuple of token ids")
        if not self.tokens:
            raise refusal("prompt", "", "it must have at least one token")
        for i, token in enumerate(self.tokens):
            if type(token) is not int or token < 0:
                raise refusal(f"token {i} of the prompt", token, "it must be a token id")
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        if not isinstance(self.sampling, SamplingOptions):
            raise refusal("sampling", self.sampling, "it must be SamplingOptions")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise refusal("stop", self.stop, "it must be a sequence of strings that are not empty")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, 100)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("continues_text", self.continues_text)
        check_flag("cache_prompt", self.cache_prompt)
        check_flag("keep_head", self.keep_head)
        if self.spec is not None:
            check_choice("spec", self.spec, get_args(Spec))
        if self.spec_width is not None:
            check_spec_width(self.spec_width)
        if self.constraint is not None:
            check_constraint(self.constraint)
        if self.constraint is not None and self.ignore_eos:
            raise refusal("ignore_eos", True, "an answer with a constraint ends where the constraint does")
        if self.reasoning_block is not None and not isinstance(self.reasoning_block, ReasoningBlock):
            raise refusal("reasoning_block", self.reasoning_block, "it must be a ReasoningBlock")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of a chosen token under the model (before temperature and cuts)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the best alternatives, best first


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """Text that became certain with one step: whole characters, never part of a stop string.

    `tokens` are those decoded since the last piece; their text may still be held back.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens that were not computed again
    reasoning_tokens: int = 0  # of the completion, those in its reasoning block; tags are not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of one request by phase."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What drafting did for one request: counts, and seconds by phase."""

    drafter: str
    verify_steps: int
    plain_steps: int
    drafted: int
    accepted: int
    accept_rates: tuple[float, ...]  # per depth: of the drafts verified there, the part that held
    steps_by_width: dict[int, int]  # verify steps by their rows
    gave_up: int  # times drafting was put aside for a burst of plain steps, since it did not pay
    step_costs: dict[int, float]  # plain steps that a step takes, by its rows, as the engine measured them
    draft_s: float  # proposing, and taking in what the target recorded
    verify_s: float
    rollback_s: float  # choosing tokens, and bringing the state to them
    plain_s: float
    # Places in the answer of greedy choices so close that plain decoding, which rounds otherwise, may differ.
    near_ties: tuple[int, ...] = ()
    shared_steps: int = 0  # of the verify steps, those in one forward with other sequences

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify step, the target's own included."""
        return 1 + self.accepted / max(1, self.verify_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReuse:
    """How much of a prompt was continued from a stored state, and why it was not more.

    `n_common` tokens are those of some stored text; there the prompt may leave it without a state to go on
    from. Models with attention alone go on from the last forward's end before it, those with recurrent state
    from where one was stored. `stop` says why: 'nothing stored', 'differs', 'no snapshot between', 'end of
    what is stored', 'whole prompt' (its last token has to run again).
    """

    n_reused: int
    n_common: int
    stop: str
    tier: Tier | None  # where the state was; None: nothing was reused
    holds_answer: bool = False  # a whole earlier answer of the conversation is part of what was reused


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The whole answer to a request."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int | None = None  # gives the same answer again; None when greedy, and where drafts were drawn
    stop: str | None = None  # the stop string that ended the answer
    logprobs: tuple[TokenLogprob, ...] = ()
    speculation: SpeculationStats | None = None  # None: decoded plainly
    plain_reason: str | None = None  # why steps were plain: nothing drafts, or it does not pay
    reuse: PromptReuse | None = None  # None: stored states were not looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimStats:
    """Trims of legacy scratch pools for one reason: 'prefill', 'idle' or 'allocation'."""

    reason: str
    n_trims: int = 0
    released_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """Where a request stands."""

    phase: Literal["queued", "prefill", "decode", "done"]
    position: int = 0  # in the queue; 1 is the next to get a slot
    done: int = 0  # prompt tokens that were read
    total: int = 0  # prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests of an engine: those that run and wait now, and what became of the others."""

    running: int = 0
    waiting: int = 0
    done: int = 0
    cancelled: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInfo:
    """What a slot does."""

    id: int
    phase: Literal["free", "prefill", "decode", "done"]
    n_past: int  # tokens in its state
    request: int | None = None  # the number of the request; None: free, or a text that is only read


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderStats:
    """Stored states in a folder: this engine's kind now, and what became of files since it opened."""

    n_states: int
    n_bytes: int  # of all files there
    saved: int
    saved_bytes: int
    save_s: float
    loaded: int
    loaded_bytes: int
    load_s: float
    evicted: int
    skipped: Mapping[str, int]  # states that were not written, by reason
    failed: Mapping[str, int]  # files that could not be used, by reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStats:
    """Stored states in memory: those of now, and what became of captures, restores and prompts."""

    place: Literal["device", "host"]  # where they lie; a plan limits the device's
    n_states: int
    n_bytes: int
    limit_bytes: int  # 0: there was no room for any
    captured: int
    captured_bytes: int
    capture_times: Histogram
    capture_failures: Mapping[str, int]  # by reason, as all mappings here
    capture_skips: Mapping[str, int]
    restored: int
    restored_bytes: int
    restore_times: Histogram
    unusable: Mapping[str, int]  # states that could not be restored, and were dropped
    without_drafter: int  # captures and restores that left out what a drafter knows
    evicted: int
    superseded: int
    hits: Mapping[str, int]  # prompts that continued a state, by where it was: 'memory', 'disk'
    misses: Mapping[str, int]
    prompt_tokens: int
    reused_tokens: int
    folder: FolderStats | None = None  # None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """One stored state: the prompt that it continues, and what it takes."""

    tokens: tuple[int, ...] = field(repr=False)
    n_past: int
    n_bytes: int
    protected: bool  # gives way after others
    saved: bool  # the folder has it too


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine does, and did since it was opened."""

    trims: tuple[TrimStats, ...]  # by reason
    peak_bytes: Mapping[str, int]  # device name -> most bytes that were held there at once
    requests: RequestCounts = field(default_factory=RequestCounts)
    slots: tuple[SlotInfo, ...] = ()
    step_failures: int = 0  # steps of a slot that failed; each is tried once more where that is possible
    allocation_retries: int = 0  # memory for a graph was refused, and asked for again after a trim
    granule_times: Histogram = field(default_factory=Histogram)  # of the prompts' forwards in one step
    pool: PoolReport = field(default_factory=PoolReport)
    devices: Mapping[str, DeviceMemory] = field(default_factory=dict)  # those of this machine, by name
    joined_prompts: int = 0  # forwards that prompts of several slots shared
    snapshots: SnapshotStats | None = None  # None: states are not stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a long phase has come; `done` reaches `total`."""

    phase: Literal["load", "prefill", "convert"]
    done: int  # tokens in prefill, else bytes
    total: int


ProgressCallback = Callable[[Progress], None]
