"""What a context takes is measured on every device, and the one that binds decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import ContextFitError, Engine, EngineOptions, fit_report
from pyggml_dflash.engine.assembly import draw, open_model
from pyggml_dflash.engine.fit import Planner
from pyggml_dflash.ggml.ledger import Ledger
from tests.engine.tiny import QWEN35
from tests.engine.workers import Worker, workers
from tests.tiny import Tiny, tokens, write_tiny

MIB = 2**20


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with workers(1) as (started,):
        yield started


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(architecture="qwen35moe", n_ctx_train=4096, n_expert=16, expert_ff=96)
    return write_tiny(tmp_path_factory.mktemp("models"), tiny)


def capped(worker: Worker, cpu: float, far: float, **options: Any) -> EngineOptions:
    """An engine with so many MiB on the CPU and on the worker."""
    caps = {"CPU": int(cpu * MIB), worker.name: int(far * MIB)}
    plain: dict[str, Any] = {"repack": "off", "spec": "off", "fit_margin": "0%", "prefix_cache_max_mib": 0}
    return EngineOptions(max_ctx="auto", device_cap=caps, threads=1, **plain, **options)


def layers(worker: Worker, cpu: float, far: float, **options: Any) -> EngineOptions:
    return capped(worker, cpu, far, model=QWEN35, devices=("CPU", worker.name), **options)


def best_by_trying(options: EngineOptions, step: int = 256) -> int:
    """The largest whole number of steps that fits, every one of them tried."""
    with ExitStack() as stack:
        ledger = Ledger(caps=options.device_cap)
        planner = Planner(draw(options, open_model(options, stack), stack, ledger), ledger)
        stack.callback(planner.close)
        fitting = [n for n in range(step, 4097, step) if planner.plan_at(n).fits]
    return max(fitting, default=0)


@pytest.mark.parametrize(
    ("cpu", "far", "binds"), [(3, 64, "CPU"), (64, 1.7, "worker"), (3.2, 1.5, "worker"), (64, 64, "none")]
)
def test_auto_finds_the_largest_context_that_the_binding_device_has_room_for(
    worker: Worker, cpu: float, far: float, binds: str
) -> None:
    options = layers(worker, cpu, far)
    report = fit_report(options)
    best = best_by_trying(options)
    assert best - 256 <= report.n_ctx <= best
    missed = {probe.device for probe in report.trace if not probe.fits}
    assert missed <= {"CPU": {"CPU"}, "worker": {worker.name}, "none": set()}[binds]
    assert bool(missed) == (binds != "none")


@pytest.mark.parametrize("split", ["layers", "experts"])
def test_what_is_held_on_each_device_is_what_the_plan_says(worker: Worker, moe: Path, split: str) -> None:
    apart: dict[str, Any] = {"devices": ("CPU", worker.name)}
    if split == "experts":
        apart = {"device": "CPU", "expert_device": worker.name}
    options = capped(worker, 8, 12, model=moe, **apart)
    with Engine(options) as engine:
        n_ctx = engine.info.n_ctx
        engine.generate(tokens(n_ctx - 8, seed=3), max_tokens=8, ignore_eos=True)
        peaks, report = engine.stats().peak_bytes, engine.fit_report()
    for share in report.devices:
        planned = sum(share.terms.values())
        assert peaks[share.device] <= planned
        assert peaks[share.device] >= 0.9 * planned


def test_a_report_shows_links_weights_and_state_of_each_device(worker: Worker, moe: Path) -> None:
    report = fit_report(capped(worker, 8, 12, model=moe, device="CPU", expert_device=worker.name))
    near, far = report.devices
    assert (near.device, far.device) == ("CPU", worker.name)
    assert "state" in near.terms
    assert "state" not in far.terms
    assert far.terms["weights"] > 0
    assert far.terms["graphs"] > 4 * 64 * report.chunk  # rows of a chunk, there and back


def test_a_context_that_the_second_device_has_no_room_for_is_refused_with_its_name(worker: Worker) -> None:
    with pytest.raises(ContextFitError) as raised:
        Engine(layers(worker, 64, 0.7))
    assert raised.value.device == worker.name
    assert worker.name in str(raised.value)


# keys and values on another device


@pytest.mark.parametrize("model", ["qwen3", "qwen35moe", "qwen4exp"])
def test_keys_and_values_elsewhere_raise_the_context_and_leave_the_text(
    worker: Worker, tmp_path: Path, model: str
) -> None:
    path = write_tiny(tmp_path, Tiny(architecture=model, n_ctx_train=4096, n_layer=6))
    near = fit_report(EngineOptions(model=path, max_ctx=256, device="CPU", threads=1, spec="off"))
    cap = 1.6 * sum(near.devices[0].terms.values()) / MIB
    options = replace(capped(worker, cap, 64, model=path, device="CPU"), device_cap={"CPU": int(cap * MIB)})
    alone = fit_report(options)
    overflowing = replace(options, kv_overflow_device=worker.name)
    report = fit_report(overflowing)
    assert 0 < alone.n_ctx < report.n_ctx
    assert report.devices[1].terms["state"] > 0
    ids = tokens(200, seed=4)
    with Engine(replace(options, max_ctx=alone.n_ctx)) as engine:
        expected = engine.generate(ids, max_tokens=20, ignore_eos=True).tokens
    with Engine(replace(overflowing, max_ctx=report.n_ctx)) as engine:
        assert engine.memory()[worker.name]["state"] > 0
        assert engine.generate(ids, max_tokens=20, ignore_eos=True).tokens == expected


def test_keys_and_values_stay_where_they_fit(worker: Worker, moe: Path) -> None:
    report = fit_report(capped(worker, 64, 64, model=moe, device="CPU", kv_overflow_device=worker.name))
    assert report.n_ctx == 4096
    assert "state" not in report.devices[1].terms


# several slots


@pytest.mark.parametrize("split", ["layers", "experts"])
def test_a_long_prompt_beside_three_short_ones_stays_within_the_plan_of_both_devices(
    worker: Worker, moe: Path, split: str
) -> None:
    apart: dict[str, Any] = {"devices": ("CPU", worker.name)}
    if split == "experts":
        apart = {"device": "CPU", "expert_device": worker.name}
    prompts = [tokens(n, seed=n) for n in (1500, 20, 33, 47)]
    with Engine(EngineOptions(model=moe, device="CPU", threads=1, repack="off", max_ctx=2048)) as engine:
        alone = [engine.generate(p, max_tokens=24, ignore_eos=True).tokens for p in prompts]
    options = capped(worker, 10, 12, model=moe, slots=4, min_ctx=1536, **apart)
    with Engine(options) as engine:
        streams = [engine.stream(p, max_tokens=24, ignore_eos=True) for p in prompts]
        found = [stream.result.tokens for stream in streams]
        peaks, report = engine.stats().peak_bytes, engine.fit_report()
    assert found == alone
    for share in report.devices:
        assert peaks[share.device] <= sum(share.terms.values())


def test_slots_share_the_memory_of_their_graphs(worker: Worker, moe: Path) -> None:
    """Of four slots that each ran a prompt, as much is held for graphs as of one."""
    held = {}
    for n_slots in (1, 4):
        options = capped(
            worker, 64, 64, model=moe, slots=n_slots, device="CPU", expert_device=worker.name, chunk=64
        )
        with Engine(replace(options, max_ctx=1024)) as engine:
            for n in range(n_slots):
                engine.generate(tokens(400, seed=n), max_tokens=1, ignore_eos=True)
            held[n_slots] = {device: by["graphs"] for device, by in engine.memory().items()}
    assert held[4] == held[1]
    assert held[1][worker.name] > 0
