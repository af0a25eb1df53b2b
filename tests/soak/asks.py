"""What is asked in a storm, and the cold answers: those of an engine that does one thing at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pyggml_dflash import Engine, GenerationResult, SamplingOptions
from pyggml_dflash.options import Spec
from tests.engine.tiny import QWEN35, opened
from tests.tiny import Tiny, write_tiny

NAMES: Final = ("qwen35", "qwen35moe", "qwen4exp", "shipped")
N_CTX: Final = 768
N_SLOTS: Final = 4
CHUNK: Final = 64
MOST_PROMPT: Final = 600
LINE: Final = 10
WIDE: Final[dict[str, Any]] = {"n_mtp": 1, "shared_ff": 64, "net_head_dim": 32, "low_rank": 32, "budget": 64}
SAMPLINGS: Final = (
    SamplingOptions(),
    SamplingOptions(),
    SamplingOptions(temperature=0.8, seed=11),
    SamplingOptions(temperature=1.2, top_k=40, top_p=0.95, seed=12),
    SamplingOptions(repetition_penalty=1.1, presence_penalty=0.5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and how it is opened for a storm."""

    name: str
    path: Path | None  # None: the one that ships
    spec: Spec
    states_mib: int  # for stored states in memory: room for a few
    folder_mib: int = 4

    def cold(self) -> Engine:
        """An engine without all that a storm is about; forwards of prompts are the same."""
        return opened(self.path, **FORM, prefix_cache_max_mib=0)

    def hot(self, folder: Path, cap: int | None) -> Engine:
        """An engine with everything, within a cap."""
        return opened(
            self.path,
            **FORM,
            spec=self.spec,
            device_cap={} if cap is None else {"CPU": cap},
            fit_margin="0",
            prefix_cache_max_mib=self.states_mib,
            prefix_cache_entries=8,
            kv_cache_dir=folder,
            kv_cache_budget=self.folder_mib,
            kv_cache_min_tokens=32,
        )


FORM: Final[dict[str, Any]] = {"slots": N_SLOTS, "max_ctx": N_CTX, "chunk": CHUNK}


def cases(folder: Path) -> tuple[Case, ...]:
    """Hybrids dense and with experts, the sparse family, each with its MTP block; and a draft of its own."""
    tiny = {name: write_tiny(folder, Tiny(architecture=name, **WIDE)) for name in ("qwen35moe", "qwen4exp")}
    return (
        Case(name="qwen35", path=QWEN35, spec="mtp", states_mib=1),
        *(Case(name=name, path=path, spec="mtp", states_mib=1) for name, path in tiny.items()),
        Case(name="shipped", path=None, spec="dflash", states_mib=4, folder_mib=8),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be the same, however a request was served."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    stop: str | None
    logprobs: tuple[object, ...]

    @classmethod
    def of(cls, result: GenerationResult) -> Answer:
        """That of a result."""
        return cls(result.tokens, result.text, result.finish_reason, result.stop, result.logprobs)

    def begins_with(self, part: Answer) -> bool:
        """True if `part` is what somebody has who left early: of its last character bytes may lack."""
        text, n = part.text.rstrip("\N{REPLACEMENT CHARACTER}"), len(part.tokens)
        return self.tokens[:n] == part.tokens and (self.text + (self.stop or "")).startswith(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt, how it is to be continued, and with what."""

    prompt: tuple[int, ...]
    options: dict[str, Any] = field(hash=False)
    answer: Answer


def asks(case: Case, engine: Engine, n: int, rng: random.Random) -> list[Ask]:
    """Turns of conversations that grow by their answers, some of them edited."""
    found: list[Ask] = []
    while len(found) < n:
        found += _conversation(case, engine, rng)
    return found[:n]


def _conversation(case: Case, engine: Engine, rng: random.Random) -> Iterator[Ask]:
    start, end = (engine.tokenize(f"<|im_{x}|>", add_special=False) for x in ("start", "end"))
    prompt = [*start, *_words(case, engine, rng, rng.choice((20, 90, 250)))]
    while len(prompt) < MOST_PROMPT:
        ask = _asked(engine, prompt, rng)
        yield ask
        if rng.random() < 0.3:  # the newest words are others
            yield _asked(engine, [*prompt[: -rng.randrange(1, 9)], *_words(case, engine, rng, 5)], rng)
        turn = _words(case, engine, rng, rng.choice((8, 30, 120)))
        prompt += [*ask.answer.tokens, *end, LINE, *start, *turn]


def _words(case: Case, engine: Engine, rng: random.Random, n: int) -> list[int]:
    if case.path is not None:
        return [rng.randrange(256) for _ in range(n)]
    names = ("Tom", "Lily", "Max", "Anna", "Ben", "Sue", "Tim", "Mia")
    tales = [f"One day {rng.choice(names)} went to see {rng.choice(names)} in the park. " for _ in range(n)]
    return engine.tokenize("".join(tales), add_special=False)[:n]


def _asked(engine: Engine, prompt: list[int], rng: random.Random) -> Ask:
    options: dict[str, Any] = {
        "max_tokens": rng.choice((1, 4, 12, 30, 60)),
        "sampling": rng.choice(SAMPLINGS),
        "ignore_eos": rng.random() < 0.7,
        "logprobs": rng.choice((None, None, 0, 2)),
        "stop": rng.choice(((), (), ("e", "zq"), ("\n\n",))),
    }
    return Ask(prompt=tuple(prompt), options=options, answer=Answer.of(engine.generate(prompt, **options)))
