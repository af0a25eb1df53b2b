"""Experts in host memory that are copied to the target for large chunks change where products are made, and
nothing else.

The target is a worker on this machine: the same kernels, behind memory that nobody else can read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pytest
from dflash_cli.engine_flags import engine_options

from pyggml_dflash import Engine, EngineOptions, UsageError, fit_report
from pyggml_dflash.api import route_stats
from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.engine.assembly import Assembly, assemble, draw, open_model
from pyggml_dflash.engine.fit import Planner, find_fit
from pyggml_dflash.engine.reuse_loader import open_reuse
from pyggml_dflash.ggml.cut import Cut, cut_of
from pyggml_dflash.ggml.ffi import c_string, lib
from pyggml_dflash.ggml.graph import measure_by_device
from pyggml_dflash.ggml.ledger import Ledger
from pyggml_dflash.ggml.ops import GraphBuilder
from pyggml_dflash.ggml.padding import NO_PADDING
from tests.engine.workers import Worker, workers
from tests.reference.opened import Floats, continued, on_the_cpu, open_core
from tests.tiny import Tiny, tokens, write_tiny

ROWS: Final = 128
IDS: Final = tokens(300, seed=11)
MODELS: Final = ("qwen35moe", "qwen4exp", "fused-and-scaled")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with workers(1) as (started,):
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def tiny(name: str) -> Tiny:
        if name == "fused-and-scaled":
            return Tiny(architecture="qwen35moe", fused_experts=True, scales=True)
        return Tiny(architecture=name, n_expert=16, expert_ff=96, n_ctx_train=4096)

    return {name: write_tiny(tmp_path_factory.mktemp("models"), tiny(name)) for name in MODELS}


def streamed(model: Path, worker: Worker, *, chunk: int = 256, **options: Any) -> EngineOptions:
    """Dense work on the worker, experts in this process, copied for 128 rows and more."""
    plain = on_the_cpu(model, chunk=chunk, repack="off", max_ctx=1024)
    return replace(
        plain, device=worker.name, expert_device="CPU", **{"stream_experts": ROWS, "spec": "off", **options}
    )


def logits(options: EngineOptions) -> Floats:
    """Those of a prompt's rows, and those that its end and decoded tokens have."""
    with open_core(options) as core:
        return np.concatenate([core.logits(IDS), np.array(list(continued(core, IDS[:280], IDS[280:])))])


@pytest.mark.parametrize("chunk", [127, 128, 200])
@pytest.mark.parametrize("model", MODELS)
def test_streamed_experts_give_the_logits_of_one_device(
    models: dict[str, Path], worker: Worker, model: str, chunk: int
) -> None:
    alone = logits(
        replace(on_the_cpu(models[model], chunk=chunk, max_ctx=1024, repack="off"), device=worker.name)
    )
    np.testing.assert_array_equal(logits(streamed(models[model], worker, chunk=chunk)), alone)


@contextmanager
def planned(options: EngineOptions) -> Iterator[Planned]:
    """One at a time: a worker serves nobody else meanwhile."""
    with ExitStack() as stack:
        yield Planned(options, stack)


class Planned:
    """An engine that is planned but not loaded, and the graphs of its forwards."""

    def __init__(self, options: EngineOptions, stack: ExitStack) -> None:
        self._stack, self.ledger = stack, Ledger(dry=True)
        self.blueprint = draw(options, open_model(options, stack), stack, self.ledger)
        planner = Planner(self.blueprint, self.ledger)
        stack.callback(planner.close)
        weights = self.blueprint.load_weights(self.ledger)
        stack.callback(weights.close)
        n_ctx = options.max_ctx
        assert isinstance(n_ctx, int)
        self.parts: Assembly = assemble(self.blueprint, weights, planner.settings(n_ctx), self.ledger, stack)

    def graph(self, n_rows: int) -> GraphBuilder:
        key = GraphKey(n_tokens=n_rows, n_kv=512, slot=0, output="all")
        builder = self.parts.forwards.builder(key)
        self._stack.callback(builder.close)
        return builder

    def cut(self, n_rows: int) -> Cut:
        found = cut_of(self.graph(n_rows))
        assert found is not None
        return found

    def fingerprint(self) -> bytes:
        reuse = open_reuse(
            self.blueprint, self.parts.slots, self.ledger, limit=0, rows=256, paddings=NO_PADDING, kept=None
        )
        assert reuse is not None
        found = reuse.fingerprint
        reuse.close()
        return found


def n_products(cut: Cut, device: str) -> int:
    """Products with experts that a device computes."""
    return sum(
        c_string(lib.ggml_op_name(node.op)) == "MUL_MAT_ID"
        for part in cut.parts
        for node in part.nodes
        if cut.backends[part.backend].name == device
    )


@pytest.mark.parametrize(("rows", "where"), [(127, "CPU"), (128, "worker"), (1, "CPU")])
def test_only_forwards_of_enough_rows_are_computed_on_the_target(
    models: dict[str, Path], worker: Worker, rows: int, where: str
) -> None:
    device = {"CPU": "CPU", "worker": worker.name}
    with planned(streamed(models["qwen35moe"], worker)) as engine:
        cut = engine.cut(rows)
        found = {name: n_products(cut, at) for name, at in device.items()}
    assert found == {"CPU": 0, "worker": 0, where: 3 * 4}


def test_a_target_holds_one_stack_of_experts_at_a_time(models: dict[str, Path], worker: Worker) -> None:
    """Beside what the forward of as many rows takes whose experts are there already."""
    options = streamed(models["qwen35moe"], worker)
    resident = replace(options, expert_device=None, stream_experts="auto")
    needs = []
    for placed in (options, resident):
        with planned(placed) as engine:
            stacks = [p.source.n_bytes for p in engine.blueprint.placements if "_exps." in p.name]
            needs.append(measure_by_device(engine.blueprint.backend, engine.graph(ROWS))[worker.name])
    assert len(stacks) == 12
    assert max(stacks) <= 2 * min(stacks)
    assert 0 < needs[0] - needs[1] <= 1.1 * max(stacks)


def test_copies_of_experts_wait_for_nothing_but_their_turn(models: dict[str, Path], worker: Worker) -> None:
    with planned(streamed(models["qwen35moe"], worker)) as engine:
        copies = [
            [c for c in part.copies if "_exps." in c_string(c.source.name)] for part in engine.cut(ROWS).parts
        ]
        found = [part for part in copies if part]
        assert [len(part) for part in found] == [1] * 12  # each in front of the product that reads it
        assert all(c.is_queued for part in found for c in part)


def test_what_a_streaming_engine_holds_is_what_its_plan_says(models: dict[str, Path], worker: Worker) -> None:
    options = streamed(models["qwen35moe"], worker, prefix_cache_max_mib=0)
    with Engine(options) as engine:
        engine.generate(tokens(1000, seed=3), max_tokens=8, ignore_eos=True)
        peaks, report = engine.stats().peak_bytes, engine.fit_report()
        assert engine.info.stream_rows == report.stream_rows == ROWS
    for share in report.devices:
        planned = sum(share.terms.values())
        assert 0.9 * planned <= peaks[share.device] <= planned


def test_a_streaming_engine_chooses_larger_chunks_that_fit(models: dict[str, Path], worker: Worker) -> None:
    options = streamed(models["qwen35moe"], worker, chunk=64, max_ctx=4096, fit_margin="0%")
    auto = replace(options, chunk="auto")
    free = fit_report(auto)
    assert free.chunk == 4096
    assert fit_report(replace(auto, stream_experts=0)).chunk == 512
    assert (
        fit_report(replace(auto, stream_experts="auto")).chunk == 512
    )  # over a network they are not streamed
    assert fit_report(options).chunk == 64
    least = replace(options, chunk=1024)
    needs = {share.device: sum(share.terms.values()) for share in fit_report(least).devices}
    tight = replace(auto, device_cap={worker.name: needs[worker.name]})
    assert ROWS <= fit_report(tight).chunk <= 1024


def test_several_slots_answer_as_one_does(models: dict[str, Path], worker: Worker) -> None:
    prompts = [tokens(n, seed=n) for n in (300, 20, 150)]
    plain: dict[str, Any] = {"threads": 1, "repack": "off", "max_ctx": 512, "chunk": 200, "spec": "off"}
    with Engine(EngineOptions(model=models["qwen35moe"], device="CPU", **plain)) as engine:
        alone = [engine.generate(p, max_tokens=12, ignore_eos=True).tokens for p in prompts]
    apart = {"device": worker.name, "expert_device": "CPU", "stream_experts": ROWS}
    with Engine(EngineOptions(model=models["qwen35moe"], slots=3, **apart, **plain)) as engine:
        streams = [engine.stream(p, max_tokens=12, ignore_eos=True) for p in prompts]
        assert [stream.result.tokens for stream in streams] == alone


def test_states_are_not_shared_with_an_engine_that_computes_otherwise(
    models: dict[str, Path], worker: Worker, tmp_path: Path
) -> None:
    model, picks = models["qwen35moe"], tmp_path / "picks.csv"
    route_stats(on_the_cpu(model), [IDS]).write(picks)
    others: tuple[dict[str, Any], ...] = (
        {},
        {"stream_experts": 0},
        {"stream_experts": 129},
        {"link_type": "f16"},
        {"prompt_streams": 2},
        {"expert_placement": picks},
        {"expert_placement": picks, "expert_budget_mib": 0},
    )
    marks = []
    for options in others:
        with planned(streamed(model, worker, **options)) as engine:
            marks.append(engine.fingerprint())
    assert len(set(marks)) == len(others) - 1
    assert marks[-1] == marks[0]  # no copies


def test_streamed_experts_stay_in_the_file_and_others_may_be_repacked(
    models: dict[str, Path], worker: Worker
) -> None:
    options = streamed(models["qwen35moe"], worker, repack="auto")
    with planned(options) as engine:
        kinds = {p.kind for p in engine.blueprint.placements if "_exps." in p.name}
        without = engine.blueprint.without_streaming("asked")
    with planned(replace(options, stream_experts=0)) as engine:
        plain = engine.blueprint.placements
    assert kinds == {"mapped"}
    assert without.placements == plain
    assert (without.streaming.rows, without.streaming.reason) == (0, "asked")


def test_a_parked_engine_streams_as_before(models: dict[str, Path], worker: Worker) -> None:
    ids = tokens(300, seed=8)
    with Engine(streamed(models["qwen35moe"], worker)) as engine:
        before = engine.generate(ids, max_tokens=8, ignore_eos=True).tokens
        engine.park()
        engine.unpark()
        assert engine.generate(ids, max_tokens=8, ignore_eos=True).tokens == before
        assert engine.info.stream_rows == ROWS


def test_experts_that_are_not_in_host_memory_cannot_be_streamed(
    models: dict[str, Path], worker: Worker
) -> None:
    plain = replace(on_the_cpu(models["qwen35moe"]), stream_experts=256)
    for options in (plain, replace(plain, expert_device=worker.name)):
        with pytest.raises(
            UsageError, match="stream_experts is 256; no other device has experts in host memory"
        ):
            fit_report(options)
    with pytest.raises(UsageError, match="stream_experts is 128; experts in CPU layouts"):
        fit_report(streamed(models["qwen35moe"], worker, repack="on"))


def test_what_cannot_be_had_is_told_once(
    models: dict[str, Path], worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    options = streamed(models["qwen35moe"], worker, expert_memory="pinned", chunk=64)
    with caplog.at_level(logging.INFO, "pyggml_dflash"), planned(options) as engine:
        pass
    assert {p.kind for p in engine.blueprint.placements if "_exps." in p.name} == {"mapped"}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f"{worker.name} has no pinned memory: experts lie in ordinary memory",
        f"forwards of 128 rows and more copy experts from host memory to {worker.name}; those of this engine "
        "have at most 64",
    ]


def test_the_flags_of_a_report_stream_as_it_says(models: dict[str, Path], worker: Worker) -> None:
    found: list[EngineOptions] = []

    @click.command()
    @engine_options
    def opens(engine: EngineOptions) -> None:
        found.append(engine)

    options = EngineOptions(model=models["qwen35moe"], device=worker.name, expert_device="CPU")
    for asked, expected in ((ROWS, ROWS), ("auto", 0), (0, 0)):
        report = fit_report(replace(options, stream_experts=asked))
        opens.main([str(options.model), *report.flags], standalone_mode=False)
        assert (found.pop().stream_experts, report.stream_rows) == (expected, expected)
    opens.main([str(options.model), "--stream-experts", "off"], standalone_mode=False)
    assert found.pop().stream_experts == 0


def test_hot_experts_beside_streamed_ones_leave_every_logit_as_it_is(
    models: dict[str, Path], worker: Worker, tmp_path: Path
) -> None:
    model, counts = models["qwen35moe"], tmp_path / "picks.csv"
    route_stats(on_the_cpu(model), [IDS]).write(counts)
    expected = logits(replace(on_the_cpu(model, chunk=200, max_ctx=1024, repack="off")))
    hot = streamed(model, worker, chunk=200, expert_placement=counts, expert_budget_mib=1)
    np.testing.assert_array_equal(logits(hot), expected)


@pytest.mark.parametrize(("room", "rows"), [(1.0, ROWS), (0.97, 0)])
def test_copies_that_nobody_asked_for_are_left_out_where_they_do_not_fit(
    models: dict[str, Path], worker: Worker, room: float, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = streamed(models["qwen35moe"], worker, chunk=512, fit_margin="0%", spec="off")
    least = next(s for s in fit_report(options).devices if s.device == worker.name)
    caps = {worker.name: int(room * least.required)}
    with planned(replace(options, device_cap=caps)) as engine, ExitStack() as stack:
        auto = replace(engine.blueprint.streaming, is_auto=True)
        blueprint, ledger = replace(engine.blueprint, streaming=auto), Ledger(caps=caps)
        with caplog.at_level(logging.INFO, "pyggml_dflash"):
            planner, choice = find_fit(blueprint, ledger, stack)
        insisting, refused = find_fit(engine.blueprint, ledger, stack)
        assert (refused.plan is not None) == (rows > 0)
        assert insisting.blueprint.streaming.rows == ROWS
    assert choice.plan is not None
    assert planner.blueprint.streaming.rows == rows
    assert ("experts are not streamed: copies would take" in caplog.text) == (rows == 0)


def test_a_drafter_that_cannot_be_computed_is_left_out_beside_copies(
    tmp_path: Path, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = Tiny(architecture="qwen35moe", n_mtp=1, n_expert=16, expert_ff=96, n_ctx_train=4096)
    table = {f"blk.{tiny.n_layer}.nextn.embed_tokens.weight": (tiny.n_embd, tiny.n_vocab)}
    options = streamed(write_tiny(tmp_path, replace(tiny, shapes=table)), worker, chunk=512, spec="auto")
    with ExitStack() as stack:
        ledger = Ledger(dry=True)
        blueprint = draw(options, open_model(options, stack), stack, ledger)
        auto = replace(blueprint, streaming=replace(blueprint.streaming, is_auto=True))
        assert auto.choice.may_be_left_out
        planner, choice = find_fit(auto, ledger, stack)
        assert (planner.blueprint.speculation, planner.blueprint.streaming.rows) == (None, ROWS)
    assert choice.plan is not None
    assert "decoding without drafts: an MTP block with a table of its own" in caplog.text
