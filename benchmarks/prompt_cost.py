"""What prompts of several slots cost that share a forward, against a forward of each.

    python benchmarks/prompt_cost.py MODEL.gguf --slots 4 --rows 8 --rows 16

Prints milliseconds for all slots, medians and ranges over --repeat rounds in which both ways take turns, and
the median of the rounds' ratios. `--cpu-time` counts the time of this process instead, which other programs
of a busy machine change less; it says something of a CPU with one thread only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rates import Spread, ratio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inside import forwards_of, on_core

from pyggml_dflash import Engine
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.joined_prompts import PromptRows


def measure(
    core: EngineCore, rows: int, n_repeat: int, clock: Callable[[], float]
) -> tuple[Spread, Spread, Spread]:
    """Milliseconds of prompts of so many rows in all slots, alone and together, and the ratio."""
    forwards = forwards_of(core)
    prompts = [
        PromptRows(slot, [17 + (i * slot.id) % 200 for i in range(rows)], "last", False)
        for slot in core.slots
    ]
    limits = replace(forwards.prompt_limits, batching=replace(forwards.batching, joined_rows=range(1, 129)))
    groups = limits.groups([(prompt, rows, 0) for prompt in prompts])
    found: tuple[list[float], list[float]] = ([], [])
    for i in range(n_repeat + 1):
        for slot in core.slots:
            slot.reset()
        started = clock()
        for prompt in prompts:
            forwards.prefill(prompt.slot, prompt.tokens, "last")
        between = clock()
        for group in groups:  # nothing was committed: the same work again
            forwards.prefill_together(group)
        if i:
            found[0].append(1e3 * (between - started))
            found[1].append(1e3 * (clock() - between))
    return Spread.of(found[0]), Spread.of(found[1]), ratio(*found)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--slots", default=4, show_default=True, type=click.IntRange(2))
@click.option("--rows", "all_rows", multiple=True, type=click.IntRange(1), default=(16,), show_default=True)
@click.option("--repeat", default=30, show_default=True, type=click.IntRange(1))
@click.option("--threads", type=click.IntRange(1))
@click.option("--cpu-time", is_flag=True, help="Time of this process.")
@click.option("--device")
def main(
    model: Path | None,
    slots: int,
    all_rows: Sequence[int],
    repeat: int,
    threads: int | None,
    cpu_time: bool,
    device: str | None,
) -> None:
    """Measure prompts of MODEL."""
    clock = time.process_time if cpu_time else time.perf_counter
    with Engine.open(
        model, max_ctx=256 * slots, slots=slots, spec="off", threads=threads, device=device
    ) as engine:
        info = engine.info
        click.echo(f"{info.name} on {info.device}, {info.threads} threads, {slots} slots")
        click.echo(f"prompts share forwards of up to {info.joined_rows} rows: {info.joined_reason}")
        for rows in all_rows:
            alone, together, times = on_core(engine, lambda core, n=rows: measure(core, n, repeat, clock))  # type: ignore[misc]
            click.echo(f"  {rows:4} rows: alone {alone}, together {together}, ratio {times}")


if __name__ == "__main__":
    main()
