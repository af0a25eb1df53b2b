"""What a context takes is measured on every device, and the one that binds decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyggml_dflash import ContextFitError, Engine, EngineOptions, fit_report
from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.arch.tiled import TILE_ROWS
from pyggml_dflash.engine.assembly import draw, open_model
from pyggml_dflash.engine.fit import FLOOR_ROWS, Planner
from pyggml_dflash.ggml.graph import GraphAllocator, measure_by_device
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.plan.chunk import TILE
from tests.engine.test_fit import built
from tests.engine.tiny import QWEN35
from tests.engine.workers import Worker, workers
from tests.reference.opened import on_the_cpu, open_core
from tests.tiny import Tiny, tokens, write_tiny

MIB = 2**20
STEP = 256
N_TRAIN = 1280
TAIL = TILE_ROWS - 1  # rows of a last chunk with the largest mask


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


@contextmanager
def planner(options: EngineOptions) -> Iterator[Planner]:
    """What plans contexts under the caps of these options."""
    with ExitStack() as stack:
        ledger = Ledger(caps=options.device_cap)
        blueprint = draw(options, open_model(options, stack), stack, ledger)
        yield stack.enter_context(closing(Planner(blueprint, ledger)))


def best_by_trying(options: EngineOptions, *, most: int = 4096) -> int:
    """The largest whole number of steps that fits, every one of them tried."""
    with planner(options) as plans:
        return max((n for n in range(STEP, most + 1, STEP) if plans.plan_at(n).fits), default=0)


@pytest.mark.parametrize(
    ("cpu", "far", "binds"), [(3, 64, "CPU"), (64, 1.7, "worker"), (3.2, 1.5, "worker"), (64, 64, "none")]
)
def test_auto_finds_the_largest_context_that_the_binding_device_has_room_for(
    worker: Worker, cpu: float, far: float, binds: str
) -> None:
    options = layers(worker, cpu, far)
    report = fit_report(options)
    best = best_by_trying(options)
    assert best - STEP <= report.n_ctx <= best
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
        most = (n_ctx - 8, n_ctx - engine.info.chunk + TAIL)  # of chunks and of tails the ones that take most
        for n in most:
            engine.generate(tokens(n, seed=3), max_tokens=8, ignore_eos=True)
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


@pytest.mark.parametrize("model", ["qwen3", "qwen35moe", pytest.param("qwen4exp", marks=pytest.mark.slow)])
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


class Seen:
    """What engines of every context were seen to hold on each device, slots filled to the end."""

    def __init__(self, worker: Worker, model: Path) -> None:
        self._worker, self._model = worker, model
        self._peaks: dict[tuple[str, int, int], dict[str, int]] = {}

    def options(self, split: str, slots: int, caps: dict[str, int] | None = None) -> EngineOptions:
        apart: dict[str, Any] = {"device": "CPU", "expert_device": self._worker.name}
        if split == "layers":
            apart = {"devices": ("CPU", self._worker.name), "tensor_split": (1.0, 1.0)}
        plain = capped(self._worker, 64, 64, model=self._model, slots=slots, chunk=64, **apart)
        return plain if caps is None else replace(plain, device_cap=caps)

    def at(self, split: str, slots: int, n_ctx: int) -> dict[str, int]:
        """The most bytes held on each device."""
        key = split, slots, n_ctx
        if key not in self._peaks:
            with Engine(replace(self.options(split, slots), max_ctx=n_ctx)) as engine:
                streams = [
                    engine.stream(tokens(n_ctx - 24, seed=i), max_tokens=24, ignore_eos=True)
                    for i in range(slots)
                ]
                assert all(len(stream.result.tokens) == 24 for stream in streams)
                self._peaks[key] = dict(engine.stats().peak_bytes)
        return self._peaks[key]

    def between(self, split: str, slots: int, n_ctx: int, device: str) -> int:
        """A cap with which a device has room for a context, and not for the next step."""
        return sum(self.at(split, slots, n)[device] for n in (n_ctx, n_ctx + STEP)) // 2


@pytest.fixture(scope="module")
def seen(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    tiny = Tiny(architecture="qwen35moe", n_ctx_train=N_TRAIN, n_expert=16, expert_ff=96)
    return Seen(worker, write_tiny(tmp_path_factory.mktemp("seen"), tiny))


@pytest.mark.parametrize(
    ("split", "slots", "near", "far"),
    [
        ("experts", 4, 768, N_TRAIN),
        pytest.param("experts", 1, 512, N_TRAIN, marks=pytest.mark.slow),
        pytest.param("layers", 4, 512, 1024, marks=pytest.mark.slow),
        pytest.param("layers", 4, 1024, 512, marks=pytest.mark.slow),
    ],
)
def test_under_caps_on_both_devices_auto_finds_what_engines_were_seen_to_hold(
    seen: Seen, worker: Worker, split: str, slots: int, near: int, far: int
) -> None:
    caps = {
        device: 64 * MIB if n == N_TRAIN else seen.between(split, slots, n, device)
        for device, n in (("CPU", near), (worker.name, far))
    }
    if split == "experts":  # which take the same, whatever the context
        caps[worker.name] = max(seen.at(split, slots, n)[worker.name] for n in (near, near + STEP))
    best = min(near, far)
    found = fit_report(seen.options(split, slots, caps)).n_ctx
    assert best - STEP <= found <= best
    assert found == best_by_trying(seen.options(split, slots, caps), most=N_TRAIN)


def test_the_chunk_is_the_largest_that_the_device_with_the_experts_has_room_for(
    seen: Seen, worker: Worker
) -> None:
    options = replace(seen.options("experts", 4), chunk="auto")
    far = next(share.terms for share in fit_report(options).devices if share.device == worker.name)
    caps = {"CPU": 64 * MIB, worker.name: far["weights"] + int(0.9 * far["graphs"])}
    options = replace(options, device_cap=caps)
    report = fit_report(options)
    with planner(options) as plans:
        fitting = [n for n in range(TILE, 513, TILE) if plans._plan(plans.settings(N_TRAIN, n)).fits]
    assert (report.n_ctx, report.chunk) == (N_TRAIN, max(fitting))
    assert FLOOR_ROWS <= report.chunk < 512


def test_four_slots_get_what_fits_one_gets_the_trained_context_and_answers_are_the_same(
    seen: Seen, worker: Worker
) -> None:
    """B2, B3: the same caps on both devices."""
    near, far = seen.at("experts", 4, 768), seen.at("experts", 4, 1024)
    caps = {"CPU": (near["CPU"] + far["CPU"]) // 2, worker.name: far[worker.name]}
    prompts = [tokens(n, seed=n) for n in (480, 20, 33, 47)]
    with Engine(seen.options("experts", 1, caps)) as engine:
        assert engine.info.n_ctx == N_TRAIN
        alone = [engine.generate(p, max_tokens=24, ignore_eos=True).tokens for p in prompts]
    with Engine(seen.options("experts", 4, caps)) as engine:
        assert engine.info.n_ctx in (512, 768)
        streams = [engine.stream(p, max_tokens=24, ignore_eos=True) for p in prompts]
        assert [stream.result.tokens for stream in streams] == alone
        assert all(engine.stats().peak_bytes[device] <= cap for device, cap in caps.items())


@pytest.mark.parametrize("split", ["layers", "experts"])
def test_a_long_prompt_beside_three_short_ones_runs_where_buffers_of_every_slot_would_not_fit(
    worker: Worker, moe: Path, split: str
) -> None:
    """B9, and hazard B07. The last chunk of the long prompt is the one that takes most, as it is planned."""
    apart: dict[str, Any] = {"devices": ("CPU", worker.name), "tensor_split": (1.0, 1.0)}
    if split == "experts":
        apart = {"device": "CPU", "expert_device": worker.name}
    options = replace(capped(worker, 64, 64, model=moe, slots=4, chunk=128, **apart), max_ctx=1536)
    shares = {share.device: share.terms for share in fit_report(options).devices}
    caps = {device: sum(terms.values()) + terms["graphs"] // 2 for device, terms in shares.items()}
    prompts = [tokens(n, seed=n) for n in (10 * 128 + TAIL, 20, 33, 47)]
    with Engine(EngineOptions(model=moe, device="CPU", threads=1, repack="off", max_ctx=1536)) as engine:
        alone = [engine.generate(p, max_tokens=24, ignore_eos=True).tokens for p in prompts]
    with Engine(replace(options, device_cap=caps)) as engine:
        streams = [engine.stream(p, max_tokens=24, ignore_eos=True) for p in prompts]
        assert [stream.result.tokens for stream in streams] == alone
        peaks = engine.stats().peak_bytes
    for device, terms in shares.items():
        planned = sum(n for name, n in terms.items() if name != "graph scratch")  # which nobody charges
        assert 0.98 * planned <= peaks[device] <= planned < caps[device]
        assert peaks[device] + 3 * terms["graphs"] > caps[device]


@pytest.mark.parametrize("split", ["layers", "experts"])
def test_prompts_of_four_slots_take_the_bytes_of_one_and_apart_they_would_take_four_times_as_many(
    worker: Worker, moe: Path, split: str
) -> None:
    """B10: to the byte, on both devices."""
    apart: dict[str, Any] = {"devices": ("CPU", worker.name)}
    if split == "experts":
        apart = {"device": "CPU", "expert_device": worker.name}
    options = capped(worker, 64, 64, model=moe, slots=4, chunk=64, **apart)
    with open_core(replace(options, max_ctx=1024)) as core:
        for slot in core.slots:
            for start in range(0, 1024, 64):
                core.prefill(slot, tokens(64, seed=start), last=start == 960)
        shared = {device: held["graphs"] for device, held in core.memory().items()}
        forwards, backend = core._forwards, core._forwards._backend
        form, separate = forwards.form(960, 64, 1024), Counter[str]()
        with ExitStack() as stack:
            for slot in core.slots:
                key = GraphKey(n_tokens=64, n_kv=1024, slot=slot.id, output="last", form=form)
                builder = forwards.builder(key)
                stack.callback(builder.close)
                assert measure_by_device(backend, builder) == shared
                own = GraphAllocator(backend, Ledger(), "graphs of a slot")
                stack.callback(own.close)
                own.place(builder)
                separate.update(own.by_device)
    assert separate == {device: 4 * n for device, n in shared.items()}


def test_logits_of_every_row_over_few_cache_rows_are_planned(worker: Worker, tmp_path: Path) -> None:
    """Masks of a whole context leave gaps, in which other rows lie; those of a short one do not."""
    tiny = Tiny(architecture="qwen35moe", n_ctx_train=2048, n_head=12, n_head_kv=3, n_layer=2, n_vocab=20_000)
    options = replace(
        on_the_cpu(write_tiny(tmp_path, tiny), chunk=63),
        device=None,
        devices=(worker.name, "CPU"),
        cache_type_k="f32",
        cache_type_v="f32",
        max_ctx=2048,
        spec="off",
        repack="off",
    )
    with built(options) as (made, core, ledger):
        core.logits(tokens(63, seed=1))
        for share in made.fit.devices:
            assert ledger.by_label(share.device)["graphs"] <= share.terms["graphs"]
