"""Drafts of several sequences at once, by the share of them that holds: tokens per second against no drafts.

    python benchmarks/drafts_together.py MODEL.gguf --spec mtp --slots 4 --holds 0.5 --holds 0.8
    python benchmarks/drafts_together.py --slots 4 --threads 1

Drafters work as always, so a draft costs what it costs; what they propose is then replaced by the tokens that
plain decoding gave, each with a chance of `--holds`, and by wrong ones else. So weights that nobody trained
show what drafts would give. All requests run at once, each side in every turn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from inside import on_core
from rates import Spread, ratio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyggml_dflash import Engine, GenerationResult
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.drafting import Proposal
from pyggml_dflash.engine.sampling import Sampler

Prompt = tuple[int, ...]


class Held:
    """Replaces what every drafter of an engine proposes, once texts are known."""

    def __init__(self, core: EngineCore) -> None:
        self.chance = 0.0
        self.answers: dict[Prompt, tuple[int, ...]] = {}
        self._random = np.random.default_rng(1)
        self._core, self._n_vocab = core, core._forwards.model.config.n_vocab
        for slot, drafter in enumerate(core._drafters):
            drafter.propose = partial(self._propose, slot, drafter.propose)

    def _propose(
        self,
        slot: int,
        real: Callable[..., Proposal],
        anchor: int,
        n_past: int,
        n_drafts: int,
        sampler: Sampler | None,
    ) -> Proposal:
        real(anchor, n_past, n_drafts, sampler)
        prompt = self._core.seat(slot).admission.tokens
        behind = (*prompt, *self.answers[prompt])[n_past + 1 : n_past + 1 + n_drafts]
        right = self._random.random(len(behind)) < self.chance
        wrong = [(token + 1) % self._n_vocab for token in behind]
        return Proposal(tuple(t if holds else w for t, w, holds in zip(behind, wrong, right, strict=True)))


def ask(
    engine: Engine, prompts: Sequence[Prompt], n: int, **options: Any
) -> tuple[float, list[GenerationResult]]:
    """All at once: tokens per second, and the answers."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        one = partial(engine.generate, max_tokens=n, ignore_eos=True, cache_prompt=False, **options)
        results = list(pool.map(one, prompts))
    return sum(len(r.tokens) for r in results) / (time.perf_counter() - started), results


def measure(
    engine: Engine, prompts: Sequence[Prompt], n: int, holds: Sequence[float], repeat: int
) -> dict[str, dict[str, Any]]:
    """Every side by its name: rate, ratio to no drafts, steps, and how many texts are those of no drafts."""
    held = on_core(engine, Held)
    rates: dict[str, list[float]] = {"off": [], **{str(chance): [] for chance in holds}}
    last: dict[str, list[GenerationResult]] = {}
    for turn in range(repeat + 1):
        for name, found in rates.items():
            if name == "off":
                rate, last[name] = ask(engine, prompts, n, spec="off")
                held.answers = {p: r.tokens for p, r in zip(prompts, last[name], strict=True)}
            else:
                held.chance = float(name)
                rate, last[name] = ask(engine, prompts, n)
            if turn:
                found.append(rate)
    return {name: summarised(last[name], last["off"], found, rates["off"]) for name, found in rates.items()}


def summarised(
    results: Sequence[GenerationResult],
    plain: Sequence[GenerationResult],
    rates: Sequence[float],
    plain_rates: Sequence[float],
) -> dict[str, Any]:
    """A side for JSON."""
    stats = [r.speculation for r in results if r.speculation is not None]
    return {
        "tokens_s": str(Spread.of(rates)),
        "ratio": str(ratio(rates, plain_rates)),
        "verify_steps": sum(s.verify_steps for s in stats),
        "of_these_shared": sum(s.shared_steps for s in stats),
        "plain_steps": sum(s.plain_steps for s in stats),
        "drafted": sum(s.drafted for s in stats),
        "accepted": sum(s.accepted for s in stats),
        "same": sum(r.tokens == p.tokens for r, p in zip(results, plain, strict=True)),
    }


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False), required=False)
@click.option("--draft", type=click.Path(exists=True, dir_okay=False), help="A DFlash draft.")
@click.option("--spec", default="auto", show_default=True, help="The drafter: 'auto', 'mtp', 'dflash'.")
@click.option("--slots", default=4, show_default=True, type=click.IntRange(2))
@click.option(
    "--holds", multiple=True, default=(0.5, 0.8, 1.0), show_default=True, type=click.FloatRange(0, 1)
)
@click.option("--width", type=click.IntRange(2), help="Rows of every sequence.  [default: as it pays]")
@click.option("--prompt", "n_prompt", default=64, show_default=True, help="Tokens of a prompt.")
@click.option("--answer", "n_answer", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1), help="Turns.")
@click.option("--max-ctx", default=1024, show_default=True, help="Context of a slot.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: one per physical core]")
@click.option("--device", help="Name of the device.  [default: the first GPU, else the CPU]")
@click.option("--option", "more", multiple=True, help="NAME=JSON: another option of Engine.open.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results there too.")
def main(
    model: str | None,
    draft: str | None,
    spec: str,
    slots: int,
    holds: tuple[float, ...],
    width: int | None,
    n_prompt: int,
    n_answer: int,
    repeat: int,
    max_ctx: int,
    threads: int | None,
    device: str | None,
    more: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Drafts of MODEL in several slots at once, by how many of them hold."""
    options: dict[str, Any] = {"draft": draft, "spec": spec, "slots": slots, "max_ctx": max_ctx}
    options |= {"threads": threads, "device": device, "spec_width": "auto" if width is None else width}
    options |= {name: json.loads(value) for name, _, value in (text.partition("=") for text in more)}
    with Engine.open(model, **options) as engine:
        high = min(engine.info.n_vocab, 4000)
        prompts = [tuple(np.random.default_rng(i).integers(0, high, n_prompt).tolist()) for i in range(slots)]
        sides = measure(engine, prompts, n_answer, holds, repeat)
        batching = on_core(engine, lambda core: core._forwards.batching)
        rows = replace(batching, paddings=type(batching.paddings)())
    report = {"sides": sides, "batching": str(rows), "drafter": engine.info.spec}
    print(json.dumps(report, indent=1))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
