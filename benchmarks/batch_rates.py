"""Tokens per second of `Engine.batch` with several slots against one, on the same requests in turns.

    python benchmarks/batch_rates.py MODEL.gguf --slots 4 --requests 32 --repeat 3

Every request is answered with the same number of tokens, so that both sides generate as many. Prompts have
different lengths and one beginning, as those of a batch often do. A batch with as many slots takes as much
memory for states; both engines are open at once, and only one of them computes.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
from rates import TEXT, Spread, ratio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyggml_dflash import BatchRequest, Engine


def requests(engine: Engine, n: int, n_prompt: int, n_answer: int) -> list[BatchRequest]:
    """Prompts of `n_prompt` tokens on average: the same beginning, and a tail of each one's own."""
    high = min(engine.info.n_vocab, 4000)
    shared = engine.tokenize(TEXT * (1 + n_prompt // 32))[: n_prompt // 2]
    random = np.random.default_rng(0)
    tails = [random.integers(0, high, random.integers(1, n_prompt)).tolist() for _ in range(n)]
    return [BatchRequest(prompt=shared + tail, max_tokens=n_answer, ignore_eos=True) for tail in tails]


def run(engine: Engine, asked: list[BatchRequest]) -> tuple[float, list[tuple[int, ...]]]:
    """Generated tokens per second, and the tokens of every answer."""
    started = time.perf_counter()
    with engine.batch(asked, ordered=False) as batch:
        found = {result.index: result.result.tokens for result in batch}
    seconds = time.perf_counter() - started
    tokens = [found[i] for i in range(len(asked))]
    return sum(map(len, tokens)) / seconds, tokens


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False), required=False)
@click.option("--slots", default=4, show_default=True, type=click.IntRange(1))
@click.option("--requests", "n_requests", default=32, show_default=True, type=click.IntRange(1))
@click.option("--prompt", "n_prompt", default=64, show_default=True, help="Tokens of a prompt, on average.")
@click.option("--answer", "n_answer", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1), help="Turns.")
@click.option("--max-ctx", default=1024, show_default=True, help="Context of a slot.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: one per physical core]")
@click.option("--spec", default="off", show_default=True, help="Speculative decoding.")
@click.option("--device", help="Name of the device.  [default: the first GPU, else the CPU]")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results there too.")
def main(
    model: str | None,
    slots: int,
    n_requests: int,
    n_prompt: int,
    n_answer: int,
    repeat: int,
    max_ctx: int,
    threads: int | None,
    spec: Any,
    device: str | None,
    json_path: Path | None,
) -> None:
    """A batch of MODEL with several slots against one."""
    rates: dict[int, list[float]] = {1: [], slots: []}
    texts = set()
    with ExitStack() as stack:
        engines = {
            n: stack.enter_context(
                Engine.open(model, slots=n, max_ctx=max_ctx, threads=threads, spec=spec, device=device)
            )
            for n in rates
        }
        asked = requests(engines[1], n_requests, n_prompt, n_answer)
        for turn in range(repeat + 1):
            for n, engine in engines.items():
                rate, tokens = run(engine, asked)
                texts.add(tuple(tokens))
                if turn:
                    rates[n].append(rate)
            print(f"turn {turn} of {repeat}" + ("" if turn else " (warm-up)"), flush=True)
    results = {
        "tokens_s": {n: str(Spread.of(found)) for n, found in rates.items()},
        "ratio": str(ratio(rates[slots], rates[1])),
        "identical": len(texts) == 1,
    }
    print(json.dumps(results))
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
