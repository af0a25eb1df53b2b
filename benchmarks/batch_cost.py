"""What a decode step of several slots costs, and what it costs that a row is the same alone and together.

    python benchmarks/batch_cost.py MODEL.gguf --slots 4 --context 256 --context 2048

Prints for one row, as the engine decodes it and as an engine of one slot does, for rows of several slots in
one forward, and for verify forwards whose rows attend one by one or all at once: milliseconds of a step, and
what that is per row in steps of an engine of one slot. Medians over --repeat rounds, in which all take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click
from rates import Spread

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inside import forwards_of, more_forwards, on_core

from pyggml_dflash import Engine
from pyggml_dflash.engine.batching import UNMEASURED
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.engine.graphs import Forwards

TOKEN: Final = 17
WIDTHS: Final = (2, 4, 8)  # of verify forwards

Runs = dict[str, tuple[int, Callable[[], object]]]  # by name: rows, and a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Forwards on the same slots: as the engine found best, and without any of it."""

    engine: Forwards
    plain: Forwards


@contextmanager
def sides(core: EngineCore) -> Iterator[Sides]:
    """Forwards that keep their graphs beside each other."""
    own = forwards_of(core)
    with ExitStack() as stack:
        found = [stack.enter_context(more_forwards(core, "replay", max(WIDTHS))) for _ in range(2)]
        found[0].use(replace(own.batching, verify_rows=max(WIDTHS)))
        found[1].use(replace(UNMEASURED, verify_rows=1))
        yield Sides(engine=found[0], plain=found[1])


def fill(core: EngineCore, n_past: int) -> None:
    """Put every slot behind a prompt."""
    for slot in core.slots:
        slot.reset()
        for start in range(0, n_past, core.chunk):
            n = min(core.chunk, n_past - start)
            core.prefill(slot, [TOKEN + i % 200 for i in range(n)], last=False)


def runs_of(core: EngineCore, both: Sides) -> Runs:
    """What is measured; nothing is committed, so every run is the same work."""
    slots, engine, plain = core.slots, both.engine, both.plain
    found: Runs = {
        "1 row, one slot": (1, lambda: plain.decode(slots[0], TOKEN)),
        "1 row": (1, lambda: engine.decode(slots[0], TOKEN)),
    }
    for n in range(2, len(slots) + 1):
        found[f"{n} slots"] = (n, lambda n=n: engine.decode_batch(slots[:n], [TOKEN] * n))  # type: ignore[misc]
    for n in WIDTHS:
        found[f"verify {n}, at once"] = (n, lambda n=n: plain.verify(slots[0], [TOKEN] * n))  # type: ignore[misc]
        if n <= engine.batching.verify_rows:
            found[f"verify {n}"] = (n, lambda n=n: engine.verify(slots[0], [TOKEN] * n))  # type: ignore[misc]
    return found


def measure(core: EngineCore, n_past: int, n_repeat: int) -> dict[str, tuple[int, Spread]]:
    """Milliseconds by name, behind `n_past` tokens."""
    fill(core, n_past)
    with sides(core) as both:
        runs = runs_of(core, both)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(n_repeat + 1):
            for name, (_, run) in runs.items():
                if i == 0:
                    run()  # builds the graph
                    continue
                started = time.perf_counter()
                run()
                seconds[name].append(1e3 * (time.perf_counter() - started))
        return {name: (runs[name][0], Spread.of(values)) for name, values in seconds.items()}


def show(context: int, found: dict[str, tuple[int, Spread]]) -> None:
    """One line for each."""
    alone = found["1 row, one slot"][1].median
    click.echo(f"behind {context} tokens, ms; per row in steps of one slot")
    for name, (rows, spread) in found.items():
        click.echo(f"  {name:18} {spread!s:28} {spread.median / alone / rows:.2f}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--slots", default=4, show_default=True)
@click.option("--context", "contexts", multiple=True, type=int, default=(256,), show_default=True)
@click.option("--repeat", default=30, show_default=True)
@click.option("--threads", type=int)
@click.option("--device")
def main(
    model: Path | None,
    slots: int,
    contexts: Sequence[int],
    repeat: int,
    threads: int | None,
    device: str | None,
) -> None:
    """Measure steps of MODEL."""
    room = max(contexts) + max(WIDTHS)
    with Engine.open(model, max_ctx=room, slots=slots, spec="off", threads=threads, device=device) as engine:
        info = engine.info
        click.echo(f"{info.name} on {info.device}, {info.threads} threads, {slots} slots")
        click.echo(f"{info.decode_mode}, {info.decode_rows} rows: {info.decode_reason}")
        for context in contexts:
            show(context, on_core(engine, lambda core, n=context: measure(core, n, repeat)))  # type: ignore[misc]


if __name__ == "__main__":
    main()
