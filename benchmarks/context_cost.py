"""What a longer context costs: prefill rate and milliseconds per decoded token at several lengths.

    python benchmarks/context_cost.py [MODEL.gguf] --context 4096 --context 16384

Without a model a tiny random `qwen4exp` is written, with the indexer's published budget. One slot is filled
with random tokens up to a length less the steps, decodes the steps, and goes on to the next length, so the
figures of all lengths belong to one sequence. Decode is the median and range over the steps. The last line
gives each length's decode time over the first length's; above --limit the exit status is 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inside import on_core
from model_shapes import PRESETS, tiny
from random_model import write_model
from rates import Spread

from pyggml_dflash import Engine
from pyggml_dflash.engine.core import EngineCore


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """At one length: tokens per second of the prefill that led to it, milliseconds per decoded token."""

    context: int
    prefill_rate: float
    decode_ms: Spread


def measure(core: EngineCore, contexts: tuple[int, ...], n_steps: int, n_vocab: int) -> list[Cost]:
    """Fill the first slot up to each length, shortest first, and decode."""
    slot, found = core.slots[0], []
    rng = np.random.default_rng(1)
    slot.reset()
    for context in sorted(contexts):
        tokens = [int(t) for t in rng.integers(0, n_vocab, context - n_steps - slot.n_past)]
        started = time.perf_counter()
        for i in range(0, len(tokens), core.chunk):
            ahead = tokens[i + core.chunk : i + 2 * core.chunk]
            core.prefill(slot, tokens[i : i + core.chunk], last=i + core.chunk >= len(tokens), ahead=ahead)
        rate = len(tokens) / (time.perf_counter() - started)
        times = []
        for token in rng.integers(0, n_vocab, n_steps):
            started = time.perf_counter()
            core.decode(slot, int(token))
            times.append(1e3 * (time.perf_counter() - started))
        times = times[min(4, n_steps - 1) :]  # the first steps build graphs
        found.append(Cost(context=context, prefill_rate=rate, decode_ms=Spread.of(times)))
    return found


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--context", "contexts", type=int, multiple=True, default=(4096, 16384), show_default=True)
@click.option("--steps", "n_steps", default=64, show_default=True, help="Tokens decoded at each length.")
@click.option("--chunk", default=512, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--device", default="CPU", show_default=True)
@click.option("--limit", default=1.5, show_default=True, help="Most that decode may grow by.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    model: Path | None, contexts: tuple[int, ...], n_steps: int, chunk: int, threads: int, device: str,
    limit: float, as_json: bool,
) -> None:  # fmt: skip
    """Measure prefill and decode at several context lengths."""
    n_ctx = max(contexts)
    with ExitStack() as stack:
        if model is None:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny.gguf"
            shape = tiny(PRESETS["qwen4exp"])
            assert shape.next is not None
            published = replace(shape.next, budget=2048, ratio=4)
            write_model(model, replace(shape, n_ctx=n_ctx, next=published), "F16")
        engine = Engine.open(
            model, max_ctx=n_ctx, chunk=chunk, threads=threads, device=device, prefix_cache_max_mib=0
        )
        with engine:
            n_vocab = engine.info.n_vocab
            costs = on_core(engine, lambda core: measure(core, contexts, n_steps, n_vocab))
    growth = [cost.decode_ms.median / costs[0].decode_ms.median for cost in costs]
    if as_json:
        print(json.dumps({"costs": [asdict(cost) for cost in costs], "growth": growth}))
    else:
        for cost, times in zip(costs, growth, strict=True):
            rates = f"prefill {cost.prefill_rate:.0f} tok/s, decode {cost.decode_ms} ms"
            print(f"{cost.context:7} tokens: {rates}, {times:.2f} of the first")
    sys.exit(max(growth) > limit)


if __name__ == "__main__":
    main()
