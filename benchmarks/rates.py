"""Prefill and decode rates of several sides over one prompt, taken in turns, and what they come to.

Turns go A B A B, so that a change of the machine's speed meets every side. The figure of a side is the
median over its repetitions; a ratio is the median over the turns' own ratios, because the two halves of a
turn are neighbours in time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from worker import Worker

HERE: Final = Path(__file__).resolve().parent
TEXT: Final = (
    "A river starts high in the hills, where rain and melting snow gather in small streams. The streams "
    "meet, grow wider and slower, and turn around stones, farms and towns. Boats carry grain, timber and "
    "people; children throw sticks from a bridge and run to see them come out on the other side. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every side computes, and how."""

    model: Path
    n_prefill: int = 512
    n_decode: int = 128
    n_ctx: int = 1024
    chunk: int = 512
    threads: int
    kv: str = "f16"
    flash_attn: str = "auto"  # "on", "off", or what each side takes by itself
    repack: bool = True
    device: str | None = "CPU"  # None: the first GPU, else the CPU
    experts_on_cpu: bool = False  # the rest on `device`
    ours: Mapping[str, Any] = field(default_factory=dict)  # more options of `Engine.open`


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median and range."""
        return cls(median=median(values), low=min(values), high=max(values))

    def __str__(self) -> str:
        digits = 0 if self.median >= 1000 else 1 if self.median >= 10 else 3
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRates:
    """One side's repetitions: tokens per second, and the ids it chose."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    tokens: tuple[int, ...]
    opened: Mapping[str, Any]  # what the worker said about itself

    def summary(self) -> dict[str, Any]:
        """For JSON: medians, ranges and every repetition."""
        phases = {"prefill": self.prefill, "decode": self.decode}
        rates = {name: {**asdict(Spread.of(v)), "all": list(v)} for name, v in phases.items()}
        return {**rates, "opened": dict(self.opened)}


def ours_command() -> list[str]:
    """How the worker of pyggml_dflash is started."""
    return [sys.executable, str(HERE / "ours_worker.py")]


def peer_command(python: Path) -> list[str]:
    """How the worker of llama-cpp-python is started, with an interpreter that has it."""
    return [str(python), str(HERE / "peer_worker.py")]


@dataclass(frozen=True, slots=True)
class Side:
    """A worker with its model open."""

    worker: Worker
    work: Work
    opened: Mapping[str, Any]

    @classmethod
    def open(cls, worker: Worker, work: Work) -> Side:
        """Load the model."""
        return cls(worker, work, worker.ask(op="open", **{**asdict(work), "model": str(work.model)}))

    def run(self, prompt: Sequence[int]) -> dict[str, Any]:
        """One repetition."""
        tokens = list(prompt[: self.work.n_prefill])
        return self.worker.ask(op="run", tokens=tokens, n_decode=self.work.n_decode)

    def tokenize(self, n: int) -> list[int]:
        """`n` ids of running text; a side of ours only."""
        tokens: list[int] = []
        text = TEXT
        while len(tokens) < n:
            tokens = self.worker.ask(op="tokenize", text=text)["tokens"]
            text += text
        return tokens[:n]


def take_turns(
    sides: Mapping[str, Side], prompt: Sequence[int], *, n_repeat: int, report: Callable[[str], None]
) -> dict[str, SideRates]:
    """Warm every side up once, then measure `n_repeat` turns; sides keep their order within a turn."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(n_repeat + 1):
        for name, side in sides.items():
            answer = side.run(prompt)
            if turn:
                answers[name].append(answer)
        report(f"turn {turn} of {n_repeat}" + ("" if turn else " (warm-up)"))
    return {
        name: SideRates(
            prefill=tuple(side.work.n_prefill / a["prefill_s"] for a in answers[name]),
            decode=tuple(side.work.n_decode / a["decode_s"] for a in answers[name]),
            tokens=tuple(answers[name][-1]["tokens"]),
            opened=side.opened,
        )
        for name, side in sides.items()
    }


def ratio(ours: Sequence[float], other: Sequence[float]) -> Spread:
    """Ours over the other's, turn by turn."""
    return Spread.of([a / b for a, b in zip(ours, other, strict=True)])


def n_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
