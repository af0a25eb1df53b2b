"""What a prompt forward of few rows takes behind a long past, by how its rows attend, on the CPU.

    python benchmarks/few_rows.py [MODEL.gguf] --position 512 --position 4096

Without a model a tiny random `qwen35` is written. One slot is filled with random tokens up to a position,
then forwards of so many rows run there again and again, the ways in turn: `rows`, flash attention as ggml
takes them, one by one below 64; `tiles`, as the engine runs them; `plain`, without flash attention.
Milliseconds of CPU time of one thread, so that other processes disturb less.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inside import forwards_of, on_core
from model_shapes import PRESETS, tiny
from random_model import write_model
from rates import Spread

from pyggml_dflash import Engine
from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.engine.core import EngineCore

ROWS = (2, 4, 8, 16, 34, 63, 64, 96, 127, 200)
Costs = dict[str, Spread]


def fill(core: EngineCore, position: int) -> None:
    """Run random tokens in the first slot up to a position."""
    slot, n_vocab, rng = core.slots[0], forwards_of(core).model.config.n_vocab, np.random.default_rng(1)
    while slot.n_past < position:
        n = min(core.chunk, position - slot.n_past)
        core.prefill(slot, rng.integers(0, n_vocab, n).tolist(), last=False)


def measure(core: EngineCore, n_rows: int, n_turns: int) -> Costs:
    """Milliseconds of a forward of so many rows behind the first slot's past, by how they attend."""
    forwards, slot, position = forwards_of(core), core.slots[0], core.slots[0].n_past
    own = forwards.model
    ways = {"rows": replace(own, tiles=False), "tiles": own, "plain": replace(own, flash_attn=False)}
    if "q8_0" in {type.label for type in forwards.cache_types}:
        del ways["plain"]
    tokens = np.random.default_rng(2).integers(0, own.config.n_vocab, n_rows).tolist()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(n_turns):
        for way, model in ways.items():
            forwards.model, slot.n_past = model, position
            started = time.process_time()
            core.prefill(slot, tokens, last=True)
            times[way].append(1e3 * (time.process_time() - started))
    forwards.model, slot.n_past = own, position
    return {way: Spread.of(found) for way, found in times.items()}


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--shipped", is_flag=True, help="Measure the shipped model.")
@click.option("--position", "positions", type=int, multiple=True, default=(512, 4096), show_default=True)
@click.option("--rows", type=int, multiple=True, default=ROWS, show_default=True)
@click.option("--cache-type", type=click.Choice(["f16", "f32", "q8_0"]), default="f16", show_default=True)
@click.option("--turns", "n_turns", default=5, show_default=True, help="Forwards of each kind.")
def main(
    model: Path | None, shipped: bool, positions: tuple[int, ...], rows: tuple[int, ...], cache_type: str,
    n_turns: int,
) -> None:  # fmt: skip
    """Measure prompt forwards of few rows."""
    n_ctx = max(positions) + max(rows)
    with ExitStack() as stack:
        if model is None and not shipped:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny.gguf"
            write_model(model, replace(tiny(PRESETS["qwen35-4b"]), n_ctx=n_ctx), "F16")
        engine = Engine.open(
            model or DEFAULT_MODEL,
            max_ctx=n_ctx,
            chunk=512,
            threads=1,
            device="CPU",
            spec="off",
            cache_type_k=cache_type,
            cache_type_v=cache_type,
            prefix_cache_max_mib=0,
        )
        with engine:
            for position in sorted(positions):
                on_core(engine, lambda core, position=position: fill(core, position))
                for n in rows:
                    costs = on_core(engine, lambda core, n=n: measure(core, n, n_turns))
                    shown = "  ".join(f"{way} {cost}" for way, cost in costs.items())
                    print(f"{position:6} {n:4} rows: {shown}", flush=True)


if __name__ == "__main__":
    main()
