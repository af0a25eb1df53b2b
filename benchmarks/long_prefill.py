"""Long prompts on a card of a given size: seconds, free memory, pool and trims, chunk by chunk.

    python benchmarks/long_prefill.py MODEL.gguf --tokens 32781 --tokens 60363 --card-gib 31.859
    python benchmarks/long_prefill.py MODEL.gguf --fill --card-gib 31.859

Each run is a process of its own, with a fresh pool. A larger card acts as a smaller one: memory beyond
`--card-gib` is taken before the model is loaded. `--fill` opens with `max_ctx='auto'` and fills the context
that was chosen with one prompt. The tokens chosen behind the prompt are compared by their hash.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from inside import backend_of

from pyggml_dflash import Engine
from pyggml_dflash.ggml.device import choose_device
from pyggml_dflash.ggml.pool import pool_stats
from pyggml_dflash.requests import Progress

GIB = 2**30
N_ANSWER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One prompt on one engine."""

    model: str
    device: str | None
    n_tokens: int | None  # None: as many as 'auto' finds room for
    trim: str
    kv: str
    chunk: int | None
    card_gib: float | None
    spec: str


@dataclass(slots=True)
class Census:
    """What memory looks like after every chunk, before a trim that may follow."""

    engine: Engine | None = None
    started: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, event: Progress) -> None:
        """Called on the engine's thread."""
        if event.phase != "prefill" or self.engine is None:
            return
        backend = backend_of(self.engine._loaded.core)
        stats = pool_stats(backend)
        self.rows.append(
            {
                "pos": event.done,
                "seconds": time.perf_counter() - self.started,
                "free": backend.memory_free(),
                "live": stats.live_bytes,
                "cached": stats.cached_bytes,
                "vmm": stats.vmm_bytes,
                "blocks": stats.n_blocks,
            }
        )


class TrimLines(logging.Handler):
    """Collects the engine's lines about trims."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line that tells of a trim."""
        if "pool-trim" in record.getMessage():
            self.lines.append(record.getMessage())


def measure(run: Run) -> dict[str, Any]:
    """Carry out one run in this process."""
    trims, census = TrimLines(), Census()
    logging.getLogger("pyggml_dflash").addHandler(trims)
    logging.getLogger("pyggml_dflash").setLevel(logging.DEBUG)
    free = choose_device(run.device).memory_free
    reserve = 0 if run.card_gib is None else max(0, free - int(run.card_gib * GIB)) // 2**20
    options: dict[str, Any] = {} if run.chunk is None else {"chunk": run.chunk}
    opened = time.perf_counter()
    with Engine.open(
        run.model,
        device=run.device,
        max_ctx="auto" if run.n_tokens is None else run.n_tokens + N_ANSWER,
        cache_type_k=run.kv,
        cache_type_v=run.kv,
        trim_interval="auto" if run.trim == "auto" else 0 if run.trim == "off" else int(run.trim),
        device_reserve_mib=reserve,
        spec=run.spec,
        prefix_cache_max_mib=0,
        **options,
    ) as engine:
        n = run.n_tokens or engine.info.n_ctx - N_ANSWER
        prompt = np.random.default_rng(1).integers(0, min(engine.info.n_vocab, 4000), n).tolist()
        census.engine, census.started = engine, time.perf_counter()
        result = engine.generate(prompt, max_tokens=N_ANSWER, ignore_eos=True, progress=census)
        after = backend_free(engine)
        stats = engine.stats()
    return {
        "run": asdict(run),
        "n_ctx": engine.info.n_ctx,
        "chunk": engine.info.chunk,
        "n_prompt": n,
        "open_s": census.started - opened,
        "prefill_s": result.timings.prefill_s,
        "reserve_mib": reserve,
        "free_at_start": free - reserve * 2**20,
        "least_free": min(row["free"] for row in census.rows),
        "free_after": after,
        "trims": [asdict(trim) for trim in stats.trims],
        "trim_lines": trims.lines,
        "peak_bytes": dict(stats.peak_bytes),
        "sha256": hashlib.sha256(np.array(result.tokens, np.int32).tobytes()).hexdigest(),
        "census": census.rows,
    }


def backend_free(engine: Engine) -> int:
    """Free bytes of the target's device."""
    return engine._thread.call(lambda core, _: backend_of(core).memory_free())


def apart(run: Run) -> dict[str, Any]:
    """`measure` in a process of its own; an error becomes part of the result."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        try:
            return pool.apply(measure, (run,))
        except Exception as error:
            return {"run": asdict(run), "error": f"{type(error).__name__}: {error}"}


def as_table(results: list[dict[str, Any]]) -> Table:
    """One line per length and setting: medians over its runs."""
    table = Table("prompt", "trim", "runs", "seconds", "tokens/s", "least free GiB", "trims", "output")
    groups: dict[tuple[Any, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["run"]["n_tokens"], result["run"]["trim"]), []).append(result)
    for (n_tokens, trim), runs in groups.items():
        good = [run for run in runs if "error" not in run]
        if not good:
            table.add_row(str(n_tokens or "auto"), trim, str(len(runs)), runs[0]["error"][:60])
            continue
        seconds = [run["prefill_s"] for run in good]
        n_trims = sum(t["n_trims"] for t in good[0]["trims"] if t["reason"] == "prefill")
        table.add_row(
            str(good[0]["n_prompt"]),
            trim,
            str(len(good)),
            f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
            f"{good[0]['n_prompt'] / median(seconds):.0f}",
            f"{min(run['least_free'] for run in good) / GIB:.3f}",
            str(n_trims),
            " ".join(sorted({run["sha256"][:8] for run in good})),
        )
    return table


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option("--tokens", type=click.IntRange(1), multiple=True, help="Prompt lengths.")
@click.option("--fill", is_flag=True, help="Also fill the context that 'auto' finds.")
@click.option("--trim", multiple=True, default=("off", "8192"), show_default=True, help="N, auto or off.")
@click.option("--kv", default="q8_0", show_default=True, help="Type of keys and values.")
@click.option("--chunk", type=click.IntRange(1), help="Rows of a chunk.  [default: the engine's choice]")
@click.option("--card-gib", type=float, help="Free memory of the device before loading.")
@click.option("--device", help="Name of the device.  [default: the first GPU, else the CPU]")
@click.option("--spec", default="off", show_default=True, help="Speculative decoding.")
@click.option("--repeat", default=1, show_default=True, help="Runs of each, in turns.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Results, written after each run.")
def main(
    model: str,
    tokens: tuple[int, ...],
    fill: bool,
    trim: tuple[str, ...],
    kv: str,
    chunk: int | None,
    card_gib: float | None,
    device: str | None,
    spec: str,
    repeat: int,
    json_path: Path | None,
) -> None:
    """Prefill long prompts of MODEL and tell what happens to memory."""
    lengths: list[int | None] = [*tokens] * repeat + ([None] if fill else [])
    results: list[dict[str, Any]] = []
    for n_tokens in lengths:
        for setting in trim:
            run = Run(
                model=model,
                device=device,
                n_tokens=n_tokens,
                trim=setting,
                kv=kv,
                chunk=chunk,
                card_gib=card_gib,
                spec=spec,
            )
            results.append(apart(run))
            brief = {k: v for k, v in results[-1].items() if k not in ("census", "run")}
            print(n_tokens or "auto", setting, json.dumps(brief), flush=True)
            if json_path is not None:
                json_path.write_text(json.dumps(results) + "\n")
    Console(width=120).print(as_table(results))


if __name__ == "__main__":
    main()
