"""Tokens per second of `Engine.batch` with several slots against one, on the same requests in turns.

    python benchmarks/batch_rates.py MODEL.gguf --slots 4 --requests 32 --repeat 3
    python benchmarks/batch_rates.py --slots 4 --stories --answer 128 --drafts auto

Every request is answered with the same number of tokens, so that all sides generate as many. Prompts have
different lengths and one beginning, as those of a batch often do; `--stories` takes those that the shipped
model answers well, so that drafts hold. Each side has a process of its own, as a user would run it, and only
one of them computes at a time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from operator import eq
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from rates import TEXT, Spread, ratio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyggml_dflash import BatchRequest, Engine

STORIES: Final = Path(__file__).resolve().parent.parent / "tests" / "data" / "pico" / "reference.json"

_engine: Engine | None = None  # of a side's process


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requests of a turn."""

    n: int
    n_prompt: int  # tokens of a prompt on average
    n_answer: int
    stories: bool

    def requests(self, engine: Engine) -> list[BatchRequest]:
        """The same for every engine of a model."""
        prompts = stories(self.n) if self.stories else random_prompts(engine, self.n, self.n_prompt)
        return [BatchRequest(prompt=p, max_tokens=self.n_answer, ignore_eos=True) for p in prompts]


def stories(n: int) -> list[list[int]]:
    """The stored prompts of the shipped model, over and over."""
    stored = [prompt["prompt_ids"] for prompt in json.loads(STORIES.read_text())["prompts"]]
    return [stored[i % len(stored)] for i in range(n)]


def random_prompts(engine: Engine, n: int, n_prompt: int) -> list[list[int]]:
    """Prompts of `n_prompt` tokens on average: the same beginning, and a tail of each one's own."""
    high = min(engine.info.n_vocab, 4000)
    shared = engine.tokenize(TEXT * (1 + n_prompt // 32))[: n_prompt // 2]
    random = np.random.default_rng(0)
    return [shared + random.integers(0, high, random.integers(1, n_prompt)).tolist() for _ in range(n)]


def open_engine(model: str | None, options: dict[str, Any]) -> None:
    """Open this process's engine."""
    global _engine
    _engine = Engine.open(model, **options)


def run(wanted: Wanted) -> tuple[float, list[tuple[int, ...]], str]:
    """Generated tokens per second, the tokens of every answer, and how slots decode."""
    assert _engine is not None
    asked = wanted.requests(_engine)
    _engine.snapshots.clear()  # of the turn before
    started = time.perf_counter()
    with _engine.batch(asked, ordered=False) as batch:
        found = {result.index: result.result.tokens for result in batch}
    seconds = time.perf_counter() - started
    tokens = [found[i] for i in range(len(asked))]
    return sum(map(len, tokens)) / seconds, tokens, _engine.info.decode_mode


def sides_of(slots: int, drafts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by the name of a side; one slot first, which others are compared with."""
    sides: dict[str, dict[str, Any]] = {"1": {"slots": 1, "spec": "off"}}
    sides[f"{slots}"] = {"slots": slots, "spec": "off"}
    for spec in drafts:
        sides |= {f"{n} {spec}": {"slots": n, "spec": spec} for n in (1, slots)}
    return sides


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False), required=False)
@click.option("--slots", default=4, show_default=True, type=click.IntRange(2))
@click.option("--requests", "n_requests", default=32, show_default=True, type=click.IntRange(1))
@click.option("--prompt", "n_prompt", default=64, show_default=True, help="Tokens of a prompt, on average.")
@click.option("--stories", is_flag=True, help="Ask the stored prompts of the shipped model instead.")
@click.option("--answer", "n_answer", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1), help="Turns.")
@click.option("--max-ctx", default=1024, show_default=True, help="Context of a slot.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: one per physical core]")
@click.option("--drafts", multiple=True, help="Sides more: speculative decoding by 'auto', 'mtp', 'dflash'.")
@click.option("--option", "more", multiple=True, help="NAME=JSON: another option of Engine.open.")
@click.option("--device", help="Name of the device.  [default: the first GPU, else the CPU]")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results there too.")
def main(
    model: str | None,
    slots: int,
    n_requests: int,
    n_prompt: int,
    stories: bool,
    n_answer: int,
    repeat: int,
    max_ctx: int,
    threads: int | None,
    drafts: tuple[str, ...],
    more: tuple[str, ...],
    device: str | None,
    json_path: Path | None,
) -> None:
    """A batch of MODEL with several slots against one."""
    options: dict[str, Any] = {"max_ctx": max_ctx, "threads": threads, "device": device}
    options |= {name: json.loads(value) for name, _, value in (text.partition("=") for text in more)}
    wanted = Wanted(n_requests, n_prompt, n_answer, stories)
    sides = sides_of(slots, drafts)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    texts, modes = dict[str, list[tuple[int, ...]]](), dict[str, str]()
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(
                ProcessPoolExecutor(1, get_context("spawn"), open_engine, (model, options | side))
            )
            for name, side in sides.items()
        }
        for turn in range(repeat + 1):
            for name, pool in pools.items():
                rate, texts[name], modes[name] = pool.submit(run, wanted).result()
                if turn:
                    rates[name].append(rate)
            print(f"turn {turn} of {repeat}" + ("" if turn else " (warm-up)"), flush=True)
    results = {
        "tokens_s": {name: str(Spread.of(found)) for name, found in rates.items()},
        "ratio": {name: str(ratio(found, rates["1"])) for name, found in rates.items() if name != "1"},
        "same": {name: sum(map(eq, found, texts["1"])) for name, found in texts.items()},
        "requests": n_requests,
        "decode_mode": modes,
    }
    print(json.dumps(results))
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
