"""Checks and rates of a GPU build, in one go: for a machine that is there only for minutes.

    python benchmarks/device_check.py --out DIR [--peer-python PYTHON] [--only SECTION ...]

Sections, each in a process of its own, so that an abort in native code costs one section:

    facts        the build, its devices and features
    logits       fixture models: teacher-forced logits on the GPU against the CPU's
    logits-no-tf32   the F32 ones again, with cuBLAS kept from rounding operands to TF32
    together     fixture models: slots that decode together give what each gives alone, bit by bit
    texts        the shipped model: greedy texts of ten prompts on the GPU against the CPU's
    pool         a bare matrix product: legacy pool before and after, trims, the same bytes afterwards
    pool-meta    the same through a one-rank meta backend
    pool-ranks   two and three ranks on the device: trimmed beside one whose stream records
    pool-capture a trim while the stream records a graph is refused and changes nothing
    pool-engine  a loaded engine: the same, and the same text afterwards
    rates        prefill and decode of the shipped model and of a random 4B file, ours and the peer's

What the pool sections expect follows from the build: blocks to give back with GGML_CUDA_NO_VMM, none on a
virtual-memory build or without CUDA. Without a GPU the CPU stands for it, which rehearses the script.
Everything goes to DIR/device_check.json after every section; a table of all checks is printed last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import device_logits
import device_pool
import device_together
from device_report import Check, Report, Setup
from random_model import PRESETS, write_model
from rates import Side, Spread, Work, n_equal, ours_command, peer_command, ratio, take_turns
from worker import Worker, WorkerError

from pyggml_dflash import Engine
from pyggml_dflash.engine.assembly import DEFAULT_MODEL
from pyggml_dflash.ggml.device import backend_features, devices

ROOT: Final = Path(__file__).resolve().parent.parent
# A GPU rounds activations of quantised weights in other blocks; on an H200 logits moved by 0.19 in the mean.
NEAR_TIE: Final = 0.1
PICO_REFERENCE: Final = ROOT / "tests" / "data" / "pico" / "reference.json"
SECTION_S: Final = 240  # longest time for a section

Ids = list[int]


def facts(report: Report, setup: Setup) -> None:
    """The build and the machine."""
    build = json.loads((ROOT / "pyggml_dflash" / "ggml" / "lib" / "build.json").read_text())
    report.details |= {
        "build": {key: build[key] for key in ("backend", "ggml", "cmake_args")},
        "devices": [asdict(device) for device in devices()],
        "features": backend_features(),
        "legacy_pool_expected": device_pool.expects_legacy_pool(),
    }
    report.check("device", setup.device, "a GPU", setup.device.upper() != "CPU")


def texts(report: Report, setup: Setup) -> None:
    """Greedy continuations of the shipped model: the CPU's, up to where its two best logits nearly tie."""
    prompts = [p["prompt"] for p in json.loads(PICO_REFERENCE.read_text())["prompts"]]
    ids: dict[str, list[Ids]] = {}
    for device in (setup.device, "CPU"):
        with Engine.open(DEFAULT_MODEL, device=device, max_ctx=2048, spec="off") as engine:
            asked = [engine.tokenize(prompt) for prompt in prompts]
            ids[device] = [list(engine.generate(tokens, max_tokens=128).tokens) for tokens in asked]
            if device == "CPU":
                for i, (gpu, cpu) in enumerate(zip(ids[setup.device], ids["CPU"], strict=True)):
                    same = n_equal(cpu, gpu)
                    gap = 0.0 if cpu == gpu else gap_after(engine, asked[i] + cpu[:same])
                    found = (
                        "equal" if cpu == gpu else f"equal for {same} of {len(cpu)}, then a gap of {gap:.3f}"
                    )
                    report.check(f"prompt {i}", found, f"equal up to a gap of {NEAR_TIE}", gap <= NEAR_TIE)
    report.details["tokens"] = ids


def gap_after(engine: Engine, tokens: list[int]) -> float:
    """How far the best logit behind `tokens` lies above the second."""
    second, best = np.sort(engine.logits(tokens)[-1])[-2:]
    return float(best - second)


def rates(report: Report, setup: Setup) -> None:
    """The shipped model and a random 4B one."""
    big = setup.big_model or setup.scratch / "qwen35-4b-Q4_K_M.gguf"
    if not big.exists():
        started = time.perf_counter()
        write_model(big, PRESETS["qwen35-4b"], "Q4_K_M")
        report.details["4b_write_s"] = time.perf_counter() - started
    for path in (DEFAULT_MODEL, big):
        try:
            _measure(report, setup, path)
        except Exception as error:
            report.check(path.name, f"{type(error).__name__}: {error}", "rates", False)


def _measure(report: Report, setup: Setup, path: Path) -> None:
    work = Work(model=path, threads=min(16, os.cpu_count() or 1), device=setup.device)
    with ExitStack() as stack:
        sides = {"ours": Side.open(stack.enter_context(Worker(ours_command())), work)}
        if setup.peer_python is not None:
            try:
                peer = stack.enter_context(Worker(peer_command(setup.peer_python)))
                sides["peer"] = Side.open(peer, work)
            except WorkerError as error:
                report.check(f"{path.name} peer", error, "rates", False)
        found = take_turns(sides, sides["ours"].tokenize(work.n_prefill), n_repeat=5, report=print)
    report.details[path.name] = {name: side.summary() for name, side in found.items()}
    for phase in ("prefill", "decode"):
        _report_rate(
            report, f"{path.name} {phase}", {name: getattr(side, phase) for name, side in found.items()}
        )


def _report_rate(report: Report, what: str, found: dict[str, tuple[float, ...]]) -> None:
    text = f"{Spread.of(found['ours'])} t/s"
    if "peer" not in found:
        report.check(what, text, "a rate", True)
        return
    versus = ratio(found["ours"], found["peer"])
    text += f", peer {Spread.of(found['peer'])}, ratio {versus}"
    report.check(what, text, "ratio >= 1", versus.median >= 1)


def pool(report: Report, setup: Setup) -> None:
    """A bare backend on the device."""
    device_pool.check_product(report, device_pool.open_backend(setup.device))


def pool_meta(report: Report, setup: Setup) -> None:
    """A meta backend with the device as its one rank."""
    device_pool.check_product(report, device_pool.open_mirrored(setup.device))


def pool_ranks(report: Report, setup: Setup) -> None:
    """Meta backends with several ranks on the device."""
    device_pool.check_ranks(report, setup.device)


def pool_capture(report: Report, setup: Setup) -> None:
    """A trim inside a capture."""
    device_pool.check_capture(report, device_pool.open_backend(setup.device))


def pool_engine(report: Report, setup: Setup) -> None:
    """A loaded engine."""
    with Engine.open(DEFAULT_MODEL, device=setup.device, max_ctx=2048, prefix_cache_max_mib=0) as engine:
        device_pool.check_engine(report, engine)


SECTIONS: Final[dict[str, Callable[[Report, Setup], None]]] = {
    "facts": facts,
    "logits": device_logits.check_logits,
    "logits-no-tf32": device_logits.check_logits_no_tf32,
    "together": device_together.check_together,
    "texts": texts,
    "pool": pool,
    "pool-meta": pool_meta,
    "pool-ranks": pool_ranks,
    "pool-capture": pool_capture,
    "pool-engine": pool_engine,
    "rates": rates,
}
SECTION_ENV: Final = {"logits-no-tf32": {"NVIDIA_TF32_OVERRIDE": "0"}}


def run_section(name: str, setup: Setup) -> Report:
    """A section in this process; what it raises becomes a failed check."""
    report = Report(name)
    started = time.perf_counter()
    try:
        SECTIONS[name](report, setup)
    except Exception as error:
        traceback.print_exc()
        report.check("runs to its end", f"{type(error).__name__}: {error}", "yes", False)
    report.details["seconds"] = time.perf_counter() - started
    return report


def run_apart(name: str, setup: Setup) -> Report:
    """A section in a process of its own; one that dies is a failed check too."""
    result = setup.scratch / f"{name}.json"
    command = [sys.executable, __file__, "--out", str(setup.out), "--scratch", str(setup.scratch)]
    command += ["--inside", name]
    for option, value in (("--peer-python", setup.peer_python), ("--big-model", setup.big_model)):
        command += [option, str(value)] if value is not None else []
    try:
        env = {**os.environ, **SECTION_ENV.get(name, {})}
        status = str(subprocess.run(command, timeout=SECTION_S, env=env, check=False).returncode)
    except subprocess.TimeoutExpired:
        status = f"stopped after {SECTION_S} s"
    report = Report(name)
    if result.exists():
        stored = json.loads(result.read_text())
        report.checks = [Check(**check) for check in stored["checks"]]
        report.details = stored["details"]
    if status != "0" or not result.exists():
        report.check("process", f"status {status}", "status 0", False)
    return report


def show(reports: list[Report]) -> Table:
    """All checks."""
    table = Table("section", "check", "found", "expected", "", title="device check")
    for report in reports:
        for check in report.checks:
            mark = "ok" if check.holds else "[red]NOT[/red]"
            table.add_row(check.section, check.what, check.found, check.expected, mark)
    return table


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Result folder.")
@click.option("--peer-python", type=click.Path(exists=True, path_type=Path), help="Interpreter of the peer.")
@click.option(
    "--big-model", type=click.Path(exists=True, path_type=Path), help="A 4B file; else one is made."
)
@click.option("--only", multiple=True, type=click.Choice(list(SECTIONS)), help="Sections to run.")
@click.option("--scratch", type=click.Path(path_type=Path), hidden=True)
@click.option("--inside", type=click.Choice(list(SECTIONS)), hidden=True)
def main(
    out: Path,
    peer_python: Path | None,
    big_model: Path | None,
    only: tuple[str, ...],
    scratch: Path | None,
    inside: str | None,
) -> None:
    """Check the first GPU of this build, and measure it."""
    out.mkdir(parents=True, exist_ok=True)
    if inside is not None:
        assert scratch is not None
        setup = Setup(out=out, scratch=scratch, peer_python=peer_python, big_model=big_model)
        report = run_section(inside, setup)
        (scratch / f"{inside}.json").write_text(json.dumps(asdict(report), indent=1, default=str))
        return
    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        setup = Setup(out=out, scratch=Path(folder), peer_python=peer_python, big_model=big_model)
        for name in only or SECTIONS:
            print(f"== {name}", flush=True)
            reports.append(run_apart(name, setup))
            everything = [asdict(report) for report in reports]
            (out / "device_check.json").write_text(json.dumps(everything, indent=1) + "\n")
    Console(width=max(100, Console().width)).print(show(reports))
    sys.exit(any(not check.holds for report in reports for check in report.checks))


if __name__ == "__main__":
    main()
