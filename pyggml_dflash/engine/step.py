"""A step as data: what a plan asks of the slots, what its report answers, and their rules. Layer 6.

A step gives every decoding slot a run of tokens, and some prompts one more forward, a granule. Where the
forwards of a prompt end depends on the prompt and on how the engine was opened, never on what else runs:
together with per-sequence samplers that makes an answer the same alone and beside others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from pyggml_dflash.engine.acceptance import Chosen
from pyggml_dflash.engine.graphs import Logits
from pyggml_dflash.engine.sampling import Sampler

GRANULE: Final = 2048  # most prompt rows that other slots wait for, where there is more than one slot

Phase = Literal["free", "prefill", "decode", "done"]  # done: everything was answered, or it failed
Outcome = Literal["done", "cancelled"]  # of a request that did not fail


class PlanError(RuntimeError):
    """A plan that does not suit the slots; nothing of it was carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a sequence brings to its slot.

    Without a sampler nothing is decoded: the logits of every row of the prompt are wanted.
    """

    tokens: tuple[int, ...]  # the prompt
    sampler: Sampler | None = None
    limit: int = 1  # most tokens of the answer, within the context
    stop_ids: frozenset[int] = frozenset()  # behind which nothing is wanted
    drafts: bool = False  # tokens may be drafted, if the drafter is free
    width: int | None = None  # rows of every verify forward; None: as cost and acceptance say
    boundaries: tuple[int, ...] = ()  # where turns begin in the prompt
    reuses: bool = False  # a stored state may be continued, and states be stored
    keep_head: bool = False  # the state of its first turn is kept longer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Slots by number: all that decode, and those whose prompt may go on by a granule."""

    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not self.decode and not self.prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Granule:
    """A prompt that went on: `n_past` tokens of it are in the slot.

    `first` is the answer's first token, once the prompt is complete. `rows`: logits F32 [n, n_vocab] of the
    granule's rows, where these are wanted.
    """

    n_past: int
    first: Chosen | None = None
    rows: Logits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The answer to a plan; every slot that it named is in exactly one of these, by its number.

    Logits are valid until the next step.
    """

    decoded: Mapping[int, Sequence[Chosen]] = field(default_factory=dict)  # never an empty run
    advanced: Mapping[int, Granule] = field(default_factory=dict)  # more of the prompt remains
    completed: Mapping[int, Granule] = field(default_factory=dict)
    failed: Mapping[int, Exception] = field(default_factory=dict)  # to be retired
    regaining: frozenset[int] = frozenset()  # a step failed that they shared; they run again what they had
    prefill_s: float = 0.0  # what the prompts' forwards took


def check_plan(plan: StepPlan, phases: Sequence[Phase]) -> None:
    """Raise `PlanError` unless the plan names each decoding slot, and else slots with a prompt only."""
    for id, n in Counter((*plan.decode, *plan.prefill)).items():
        if not 0 <= id < len(phases):
            raise PlanError(f"slot {id} is planned; there are {len(phases)}")
        if n > 1:
            raise PlanError(f"slot {id} is planned {n} times")
    for wanted, ids in (("decode", plan.decode), ("prefill", plan.prefill)):
        for id in ids:
            if phases[id] != wanted:
                raise PlanError(f"{wanted} is planned for slot {id}, which is {_shown(phases[id])}")
    missing = [id for id, phase in enumerate(phases) if phase == "decode" and id not in plan.decode]
    if missing:
        raise PlanError(f"the plan leaves out slot {missing[0]}, which decodes")


def _shown(phase: Phase) -> str:
    return {"free": "free", "done": "done", "prefill": "at its prompt", "decode": "decoding"}[phase]


def granule_of(chunk: int, n_slots: int) -> int:
    """Most rows of a prompt forward in an engine of so many slots."""
    return chunk if n_slots == 1 else min(chunk, GRANULE)
