"""Microseconds of Python per decode step: what our code adds to ggml's computing. Budget: 60.

    python benchmarks/step_overhead.py

A model of one tiny layer decodes some hundred tokens on one CPU thread, which keeps the computing short but
not the Python: a decode step makes the same calls for one layer as for sixty. Its native part is taken out
by clocking the two C calls of a step, `ggml_backend_graph_compute_async` and `ggml_backend_synchronize`,
through a wrapper; what the wrapper itself costs (about 0.3 us) stays in, on our side. Two figures:

    step    `EngineCore.decode`: pick the kept graph, write the inputs, run, hand out the logits.
            This is what the budget is about.
    token   the whole loop of a request: the step, choosing the token, detokenizing, stop strings, and
            handing pieces to a reader in another thread. Choosing costs an argmax over the vocabulary
            (512 rows here), so it grows with it.

Each run of the model gives one mean over its steps; printed are median and range over the runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inside import on_core
from random_model import PRESETS, write_model
from rates import Spread

from pyggml_dflash import Engine
from pyggml_dflash.engine.core import EngineCore
from pyggml_dflash.ggml.graph import StepGraph

BUDGET_US: Final = 60.0
N_STEPS: Final = 200  # all within the first bucket of 256 cache rows, so no graph is built meanwhile
PROMPT: Final = (72, 101, 108, 108)


class Clock:
    """Time spent inside wrapped calls."""

    def __init__(self) -> None:
        self.ns = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, clocked."""

        def clocked(*args: Any) -> Any:
            started = time.perf_counter_ns()
            result = call(*args)
            self.ns += time.perf_counter_ns() - started
            return result

        return clocked


def clock_graphs(core: EngineCore, clock: Clock) -> None:
    """Clock the native calls of every decode graph that the core keeps."""
    graphs: list[StepGraph] = list(core._forwards._cache._kept.values())
    assert graphs, "no decode graph is kept; decode a token first"
    for graph in graphs:
        graph._compute = clock.wrap(graph._compute)
        graph._synchronize = clock.wrap(graph._synchronize)


def step_us(core: EngineCore, clock: Clock) -> float:
    """Python's share of one bare decode step, mean over a run."""
    slot = core.slots[0]
    slot.reset()
    core.prefill(slot, PROMPT, last=True)
    clock.ns, decode = 0, core.decode
    started = time.perf_counter_ns()
    for _ in range(N_STEPS):
        decode(slot, 65)
    return (time.perf_counter_ns() - started - clock.ns) / N_STEPS / 1000


def token_us(engine: Engine, clock: Clock) -> float:
    """Python's share of one token of a streamed answer, mean over a run."""
    clock.ns = 0
    with engine.stream(PROMPT, max_tokens=N_STEPS + 1, ignore_eos=True) as stream:
        for _ in stream:
            pass
        decode_s = stream.result.timings.decode_s
    return (decode_s * 1e9 - clock.ns) / N_STEPS / 1000


def measure(n_runs: int) -> dict[str, Spread]:
    """Spreads over `n_runs` runs, after one that warms up, in microseconds."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "step.gguf"
        write_model(model, PRESETS["llama-step"], "F16")
        with Engine.open(model, max_ctx=256, threads=1, prefix_cache_max_mib=0) as engine:
            engine.generate(PROMPT, max_tokens=2, ignore_eos=True)
            on_core(engine, lambda core: clock_graphs(core, clock))
            figures: dict[str, list[float]] = {"step": [], "token": []}
            for run in range(n_runs + 1):
                step = on_core(engine, lambda core: step_us(core, clock))
                token = token_us(engine, clock)
                if run:
                    figures["step"].append(step)
                    figures["token"].append(token)
    return {name: Spread.of(values) for name, values in figures.items()}


@click.command()
@click.option("--runs", "n_runs", default=30, show_default=True, help="Runs that count.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(n_runs: int, as_json: bool) -> None:
    """Measure Python's share of a decode step; exit 1 if it is over the budget."""
    spreads = measure(n_runs)
    if as_json:
        figures = {name: asdict(spread) for name, spread in spreads.items()}
        print(json.dumps({"runs": n_runs, "steps": N_STEPS, "budget_us": BUDGET_US, "us": figures}))
    else:
        for name, spread in spreads.items():
            print(f"{name:6} {spread} us of Python; n = {n_runs} runs of {N_STEPS} steps")
        print(f"budget {BUDGET_US:.0f} us for a step")
    sys.exit(spreads["step"].median > BUDGET_US)


if __name__ == "__main__":
    main()
