"""The sides of `speculation.py`: one engine per drafter, and requests that use it in different ways.

Plain decoding is a request with spec 'off' to the same engine, so weights, cache and threads are the same.
The fake drafter knows the answer and proposes each token of it with a given chance; it costs nothing, so it
shows what the engine itself spends on drafts that do not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from inside import drafter_of, forwards_of, on_core

from pyggml_dflash import Engine, GenerationResult
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.drafting import Backlog, Drafter, Proposal
from pyggml_dflash.engine.prompt_steps import PromptSteps
from pyggml_dflash.engine.sampling import Sampler
from pyggml_dflash.engine.step_costs import measure_steps
from pyggml_dflash.engine.width import VerifyWidth
from pyggml_dflash.options import Auto
from pyggml_dflash.plan.measure import MemoryProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How answers are made: by the engine of `drafter`, plainly or with a width; or by a fake drafter."""

    name: str
    drafter: str  # 'dflash' or 'mtp': whose engine it is
    width: int | Auto | None = "auto"  # None: plain decoding
    chance: float | None = None  # of a fake draft to hold


@dataclass(slots=True)
class Tally:
    """What a side did in one repetition over all prompts."""

    n_tokens: int = 0
    decode_s: float = 0.0
    verify_steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    gave_up: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    held: Counter[int] = field(default_factory=Counter)  # by position from 1: drafts that held
    tried: Counter[int] = field(default_factory=Counter)
    steps_by_width: Counter[int] = field(default_factory=Counter)
    step_costs: dict[int, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  # why steps were plain, once each

    def add(self, result: GenerationResult) -> None:
        """Count an answer; its first token comes out of the prefill."""
        self.n_tokens += len(result.tokens) - 1
        self.decode_s += result.timings.decode_s
        stats = result.speculation
        if stats is None:
            self.seconds["plain"] += result.timings.decode_s
            return
        self.verify_steps += stats.verify_steps
        self.plain_steps += stats.plain_steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.gave_up += stats.gave_up
        for name in ("draft", "verify", "rollback", "plain"):
            self.seconds[name] += getattr(stats, f"{name}_s")
        self.steps_by_width.update(stats.steps_by_width)
        self.step_costs = stats.step_costs
        for i, rate in enumerate(stats.accept_rates):
            n_tried = sum(n for rows, n in stats.steps_by_width.items() if rows > i + 1)
            self.tried[i + 1] += n_tried
            self.held[i + 1] += round(rate * n_tried)
        if result.plain_reason is not None and result.plain_reason not in self.reasons:
            self.reasons.append(result.plain_reason)

    @property
    def rate(self) -> float:
        """Tokens per second of decoding."""
        return self.n_tokens / self.decode_s


class FakeDrafter:
    """Proposes the tokens of a known answer, each with the same chance, and wrong ones else."""

    name = "fake"

    def __init__(self, like: Drafter, chance: float, n_vocab: int) -> None:
        self.capture, self.max_drafts = like.capture, like.max_drafts
        self._chance, self._n_vocab = chance, n_vocab
        self._random = np.random.default_rng(1)
        self._text: Sequence[int] = ()

    def expect(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The text that the next request will have."""
        self._text = (*prompt, *answer)

    def begin(self) -> None:
        """Nothing is known of a sequence but its text."""

    def observe(self, tokens: Sequence[int], n_past: int, row: int | None = None) -> None:
        """Nothing is learned."""

    def propose(self, anchor: int, n_past: int, n_drafts: int, sampler: Sampler | None) -> Proposal:
        """Right with the given chance, position by position."""
        right = self._random.random(n_drafts) < self._chance
        following = [*self._text[n_past + 1 : n_past + 1 + n_drafts], *[0] * n_drafts][:n_drafts]
        return Proposal(
            tuple(
                token if holds else (token + 1) % self._n_vocab
                for token, holds in zip(following, right, strict=True)
            )
        )

    def needs(self, probe: MemoryProbe) -> int:
        """Nothing."""
        return 0

    def close(self) -> None:
        """Nothing is owned."""


class FakeSeat:
    """Puts a fake drafter into an engine for single requests; what its control learns stays with it."""

    def __init__(self, engine: Engine, chance: float) -> None:
        self._engine = engine
        self._seat: dict[str, Any] = on_core(engine, lambda core: self._make(core, chance))

    @staticmethod
    def _make(core: EngineCore, chance: float) -> dict[str, Any]:
        forwards, real = forwards_of(core), drafter_of(core)
        assert real is not None
        assert forwards.recording is not None
        fake = FakeDrafter(real, chance, forwards.model.config.n_vocab)
        width = min(forwards.recording.max_width, fake.max_drafts + 1)
        seconds = measure_steps(forwards, fake, core.slots[0], width)
        backlogs = (Backlog(forwards, fake),)
        return {
            "_drafters": (fake,),
            "_backlogs": backlogs,
            "_prompts": PromptSteps(forwards, backlogs, core._failures, core.trims),
            "_control": VerifyWidth(width, seconds),
        }

    def generate(self, prompt: Sequence[int], answer: Sequence[int], **options: Any) -> GenerationResult:
        """An answer that is known, drafted by the fake."""
        self._seat["_drafters"][0].expect(prompt, answer)
        real = on_core(self._engine, lambda core: {name: getattr(core, name) for name in self._seat})
        on_core(self._engine, lambda core: [setattr(core, name, x) for name, x in self._seat.items()])
        try:
            return self._engine.generate(prompt, **options)
        finally:
            on_core(self._engine, lambda core: [setattr(core, name, x) for name, x in real.items()])


class Runner:
    """Answers prompts as any side."""

    def __init__(self, engines: dict[str, Engine], n_tokens: int) -> None:
        self._engines, self._n_tokens = engines, n_tokens
        self._seats: dict[Side, FakeSeat] = {}
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}  # of plain decoding, by prompt

    def answer(self, side: Side, prompt: tuple[int, ...]) -> GenerationResult:
        """One answer; a fake drafter needs that plain decoding has answered the prompt before."""
        engine = self._engines[side.drafter]
        if side.chance is not None:
            if side not in self._seats:
                self._seats[side] = FakeSeat(engine, side.chance)
            return self._seats[side].generate(prompt, self._answers[prompt], max_tokens=self._n_tokens)
        if side.width is None:
            result = engine.generate(prompt, max_tokens=self._n_tokens, spec="off")
            self._answers[prompt] = result.tokens
            return result
        return engine.generate(prompt, max_tokens=self._n_tokens, spec_width=side.width)

    def agrees(self, prompt: tuple[int, ...], result: GenerationResult) -> bool:
        """True if an answer is that of plain decoding."""
        return result.tokens == self._answers[prompt]
