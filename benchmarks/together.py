"""Several requests at once: together against alone, a long prompt beside short ones, a prompt sent again.

    python benchmarks/together.py MODEL.gguf --slots 4 --repeat 3
    python benchmarks/together.py MODEL.gguf --slots 4 --long 98304 --card-gib 31.859 --kv q8_0
    python benchmarks/together.py MODEL.gguf --resend 16384 --resend 6144

The first form answers short prompts one after another and then all at once, in turns, and compares the
texts. `--long` sends one long prompt with short ones beside it and samples the device's free memory.
`--resend` sends a prompt, then the same, one with another end, and one that goes on: what the engine still
has need not be computed. Where the vocabulary has the markers of ChatML, a conversation is sent as well.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from rates import Spread

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyggml_dflash import Engine, GenerationResult
from pyggml_dflash.ggml.device import choose_device

GIB: Final = 2**30
SAMPLE_S: Final = 0.1
TAIL: Final = 32  # tokens by which a resent prompt differs


@dataclass(slots=True)
class FreeMemory:
    """The least that the device had free while sampled."""

    device: str | None
    least: int = 2**63
    _done: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample until the block ends."""
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.least = min(self.least, choose_device(self.device).memory_free)


def prompts(engine: Engine, n: int, n_tokens: int) -> list[list[int]]:
    """Different prompts of the same length."""
    high = min(engine.info.n_vocab, 4000)
    return [np.random.default_rng(seed).integers(0, high, n_tokens).tolist() for seed in range(n)]


def digest(results: Sequence[GenerationResult]) -> list[str]:
    """A short hash of each answer's tokens."""
    return [hashlib.sha256(np.array(r.tokens, np.int32).tobytes()).hexdigest()[:12] for r in results]


def ask(engine: Engine, prompt: list[int], n: int) -> GenerationResult:
    """The answer to a prompt that is read whole."""
    return engine.generate(prompt, max_tokens=n, ignore_eos=True, cache_prompt=False)


def answer(engine: Engine, asked: Sequence[list[int]], n: int, *, together: bool) -> tuple[float, list[str]]:
    """Seconds for all answers of `n` tokens, and their hashes."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(asked) if together else 1) as pool:
        results = list(pool.map(lambda p: ask(engine, p, n), asked))
    return time.perf_counter() - started, digest(results)


def short_prompts(engine: Engine, n_slots: int, n_prompt: int, n_answer: int, repeat: int) -> dict[str, Any]:
    """Alone and together, in turns."""
    asked = prompts(engine, n_slots, n_prompt)
    answer(engine, asked, 4, together=True)  # builds graphs
    alone, both, ratios, texts = [], [], [], set()
    for _ in range(repeat):
        for together, found in ((False, alone), (True, both)):
            seconds, hashes = answer(engine, asked, n_answer, together=together)
            found.append(n_slots * n_answer / seconds)
            texts.add(tuple(hashes))
        ratios.append(both[-1] / alone[-1])
    return {
        "alone_tokens_s": str(Spread.of(alone)),
        "together_tokens_s": str(Spread.of(both)),
        "ratio": str(Spread.of(ratios)),
        "identical": len(texts) == 1,
        "same": [len(set(column)) == 1 for column in zip(*texts, strict=True)],
    }


def long_beside_short(engine: Engine, n_slots: int, n_long: int, device: str | None) -> dict[str, Any]:
    """A long prompt and short ones that answer meanwhile; texts against those alone."""
    (long,), short = prompts(engine, 1, n_long), prompts(engine, n_slots - 1, 64)
    _, cold = answer(engine, short, 64, together=False)
    free = FreeMemory(device)
    with free.sampled(), ThreadPoolExecutor(n_slots) as pool:
        started = time.perf_counter()
        late = pool.submit(ask, engine, long, 16)
        rest = list(pool.map(lambda p: ask(engine, p, 64), short))
        short_s = time.perf_counter() - started
        result = late.result()
        seconds = time.perf_counter() - started
    return {
        "n_long": n_long,
        "seconds": round(seconds, 2),
        "short_s": round(short_s, 2),
        "least_free_gib": round(free.least / GIB, 3),
        "long": digest([result])[0],
        "short_identical": digest(rest) == cold,
    }


def conversation(engine: Engine, prompt: list[int]) -> list[int] | None:
    """A prompt of the same length whose tokens are those of four turns; None without markers for them."""
    start, end = (engine.tokenize(m, add_special=False) for m in ("<|im_start|>", "<|im_end|>"))
    if len(start) != 1 or len(end) != 1:
        return None
    line = engine.tokenize("\n", add_special=False)
    head, n = [*start, 0, *line], len(prompt)
    ends = [n // 8, n // 2, n - n // 16, n - len(head)]  # the newest turn has a sixteenth
    turns = []
    for first, last in zip([0, *ends], ends, strict=False):
        body = prompt[first + len(head) : last - len(end) - len(line)]
        turns += [*head, *body, *end, *line]
    return [*turns, *head]


def resend(engine: Engine, n_tokens: int) -> dict[str, Any]:
    """What a prompt costs, raw and as a conversation, when it is sent again."""
    (prompt,) = prompts(engine, 1, n_tokens)
    turn = [
        *engine.tokenize("<|im_start|>", add_special=False),
        *engine.tokenize("<|im_end|>", add_special=False),
    ]
    prompt = [0 if token in turn else token for token in prompt]
    kinds = {"raw": prompt, "turns": conversation(engine, prompt)}
    return {"n_tokens": n_tokens, **{k: sent_again(engine, text) for k, text in kinds.items() if text}}


def sent_again(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Seconds for a prompt, the same, one with another end and one that goes on; what was cached of them."""
    engine.snapshots.clear()
    (tail,) = prompts(engine, 1, TAIL)
    asked = {"cold": prompt, "same": prompt, "other_end": [*prompt[:-TAIL], *reversed(tail)]}
    asked["longer"] = [*prompt, *tail]
    found = {name: engine.generate(text, max_tokens=8, ignore_eos=True) for name, text in asked.items()}
    seconds = {name: result.timings.prefill_s for name, result in found.items()}
    return {
        "seconds": {name: round(s, 4) for name, s in seconds.items()},
        "percent": {name: round(100 * s / seconds["cold"], 2) for name, s in seconds.items()},
        "rows": {name: len(asked[name]) - result.usage.cached_tokens for name, result in found.items()},
        "identical": found["same"].tokens == found["cold"].tokens,
    }


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False), required=False)
@click.option("--slots", default=4, show_default=True, type=click.IntRange(1))
@click.option("--max-ctx", type=click.IntRange(1), help="Context of a slot.  [default: 'auto']")
@click.option("--prompt", "n_prompt", default=64, show_default=True, help="Tokens of a short prompt.")
@click.option("--answer", "n_answer", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--repeat", default=3, show_default=True, help="Turns of the short prompts; 0: none.")
@click.option("--long", "n_long", type=click.IntRange(1), multiple=True, help="Lengths of long prompts.")
@click.option("--resend", "n_resend", type=click.IntRange(TAIL + 1), multiple=True, help="Lengths to resend.")
@click.option("--card-gib", type=float, help="Free memory of the device before loading.")
@click.option("--kv", default="f16", show_default=True, help="Type of keys and values.")
@click.option("--spec", default="off", show_default=True, help="Speculative decoding.")
@click.option("--device", help="Name of the device.  [default: the first GPU, else the CPU]")
@click.option("--option", "more", multiple=True, help="NAME=VALUE: another option of Engine.open.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results there too.")
def main(
    model: str | None,
    slots: int,
    max_ctx: int | None,
    n_prompt: int,
    n_answer: int,
    repeat: int,
    n_long: tuple[int, ...],
    n_resend: tuple[int, ...],
    card_gib: float | None,
    kv: str,
    spec: str,
    device: str | None,
    more: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Requests of MODEL at once and one after another."""
    free = choose_device(device).memory_free
    reserve = 0 if card_gib is None else max(0, free - int(card_gib * GIB)) // 2**20
    options: dict[str, Any] = dict(x.split("=", 1) for x in more)
    with Engine.open(
        model,
        slots=slots,
        max_ctx="auto" if max_ctx is None else max_ctx,
        device=device,
        device_reserve_mib=reserve,
        cache_type_k=kv,
        cache_type_v=kv,
        spec=spec,
        **{
            name: json.loads(value) if value[:1] in "0123456789tf" else value
            for name, value in options.items()
        },
    ) as engine:
        info = engine.info
        results: dict[str, Any] = {"n_ctx": info.n_ctx, "chunk": info.chunk, "device": info.device}
        print(results, flush=True)
        sections = (
            [("short", lambda: short_prompts(engine, slots, n_prompt, n_answer, repeat))] if repeat else []
        )
        sections += [(f"long {n}", lambda n=n: long_beside_short(engine, slots, n, device)) for n in n_long]
        sections += [(f"resend {n}", lambda n=n: resend(engine, n)) for n in n_resend]
        for name, section in sections:
            results[name] = section()
            print(name, json.dumps(results[name]), flush=True)
            if json_path is not None:
                json_path.write_text(json.dumps(results, indent=1) + "\n")
        print("stats", engine.stats())


if __name__ == "__main__":
    main()
