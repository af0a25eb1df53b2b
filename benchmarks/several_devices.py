"""A model on one device and spread over several: texts, rates, and what each device holds against the plan.

    python benchmarks/several_devices.py MODEL.gguf device=CUDA0 devices=CUDA0,CUDA1,tensor_split=1,3 \\
        device=CUDA0,expert_device=CUDA1

Each argument is a setting: options of `Engine.open`, NAME=VALUE, separated by commas; a part without '='
belongs to the value before it. The first setting is the one that the others are compared with. Every run is
a process of its own; settings take turns.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyggml_dflash import Engine

N_PROMPTS: Final = 4
MIB: Final = 2**20


def parse(text: str) -> dict[str, Any]:
    """Options of a setting."""
    found: list[list[str]] = []
    for part in text.split(","):
        if "=" in part:
            found.append(part.split("=", 1))
        elif found:
            found[-1][1] += f",{part}"
        else:
            raise click.UsageError(f"setting {text!r} does not begin with NAME=VALUE")
    options: dict[str, Any] = {}
    for name, value in found:
        if name == "devices":
            options[name] = tuple(value.split(","))
        elif name == "tensor_split":
            options[name] = tuple(float(x) for x in value.split(","))
        else:
            options[name] = int(value) if value.isdigit() else value
    return options


def measure(
    model: str, options: dict[str, Any], n_prefill: int, n_decode: int, cap_gib: float | None
) -> dict[str, Any]:
    """One setting in this process."""
    if cap_gib is not None:
        names = options.get("devices") or (options["device"], options.get("expert_device", "CPU"))
        options = {**options, "device_cap": {n: int(cap_gib * 2**30) for n in names if n != "CPU"}}
    started = time.perf_counter()
    with Engine.open(model, spec="off", prefix_cache_max_mib=0, **{"max_ctx": 16384, **options}) as engine:
        opened = time.perf_counter() - started
        high = min(engine.info.n_vocab, 4000)
        draw = np.random.default_rng(1)
        texts = []
        for _ in range(N_PROMPTS):
            prompt = draw.integers(0, high, 96).tolist()
            texts.append(engine.generate(prompt, max_tokens=48, ignore_eos=True).tokens)
        long = draw.integers(0, high, n_prefill).tolist()
        result = engine.generate(long, max_tokens=n_decode, ignore_eos=True)
        stats, report = engine.stats(), engine.fit_report()
        return {
            "n_ctx": engine.info.n_ctx,
            "open_s": round(opened, 1),
            "texts": [digest(t) for t in (*texts, result.tokens)],
            "prefill": n_prefill / result.timings.prefill_s,
            "decode": (n_decode - 1) / result.timings.decode_s,
            "peak_mib": {name: n // MIB for name, n in stats.peak_bytes.items()},
            "planned_mib": {d.device: sum(d.terms.values()) // MIB for d in report.devices},
            "trims": [(t.reason, t.n_trims, t.released_bytes // MIB) for t in stats.trims],
        }


def digest(tokens: Any) -> str:
    """A short hash of tokens."""
    return hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()[:8]


def apart(*arguments: Any) -> dict[str, Any]:
    """`measure` in a process of its own; an error becomes the result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply(measure, arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.argument("settings", nargs=-1, required=True)
@click.option("--prefill", default=8192, show_default=True, help="Tokens of the long prompt.")
@click.option("--decode", default=128, show_default=True, help="Tokens behind it.")
@click.option("--repeat", default=1, show_default=True, help="Runs of each setting, in turns.")
@click.option("--cap-gib", type=float, help="Most memory to hold on each device but the CPU.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results there too.")
def main(
    model: str,
    settings: tuple[str, ...],
    prefill: int,
    decode: int,
    repeat: int,
    cap_gib: float | None,
    json_path: Path | None,
) -> None:
    """MODEL under several placements."""
    results: dict[str, list[dict[str, Any]]] = {text: [] for text in settings}
    for _ in range(repeat):
        for text in settings:
            found = apart(model, parse(text), prefill, decode, cap_gib)
            results[text].append(found)
            print(text, json.dumps(found), flush=True)
            if json_path is not None:
                json_path.write_text(json.dumps(results, indent=1) + "\n")
    expected = results[settings[0]][0].get("texts")
    for text, runs in results.items():
        good = [run for run in runs if "error" not in run]
        if not good:
            continue
        same = [a == b for a, b in zip(good[0]["texts"], expected or [], strict=True)]
        rates = {name: f"{median(run[name] for run in good):.1f}" for name in ("prefill", "decode")}
        print(f"{text}: tokens/s {rates}, texts as the first setting's: {same}")


if __name__ == "__main__":
    main()
