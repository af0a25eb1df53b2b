"""Copies of experts on the target change where products are made, never what comes out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from pyggml_dflash import EngineOptions, UsageError, fit_report
from pyggml_dflash.api import route_stats
from pyggml_dflash.arch.base import GraphKey
from pyggml_dflash.ggml.cut import cut_of
from pyggml_dflash.ggml.ffi import c_string, lib
from pyggml_dflash.plan.hot_experts import RouteStats
from tests.cli.dflash_command import told
from tests.engine.workers import Worker, workers
from tests.reference.opened import Floats, continued, on_the_cpu, open_core
from tests.tiny import Tiny, tokens, write_tiny

MIB: Final = 2**20
IDS: Final = tokens(60, seed=5)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with workers(1) as (started,):
        yield started


@pytest.fixture(scope="module", params=["qwen35moe", "qwen4exp", "fused-and-scaled"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = Tiny(architecture=request.param, n_expert=16, n_used=3)
    special = replace(plain, architecture="qwen35moe", fused_experts=True, scales=True)
    tiny = special if request.param == "fused-and-scaled" else plain
    return write_tiny(tmp_path_factory.mktemp("models"), tiny)


@pytest.fixture(scope="module")
def counted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counts") / "picks.csv"
    route_stats(on_the_cpu(model), [IDS]).write(path)
    return path


def decoded(options: EngineOptions, *, near: bool = False) -> Floats:
    """The logits behind a short prompt and of decoded tokens; `near`: as between devices of one machine."""
    with open_core(options) as core:
        core._forwards._backend.near_links |= near
        return np.array(list(continued(core, IDS[:20], IDS[20:])))


def test_every_token_picks_as_many_experts_in_each_layer_as_the_model_uses(counted: Path) -> None:
    stats = RouteStats.read(counted)
    assert stats.n_tokens == len(IDS)
    assert (stats.picks.sum(1) == 3 * len(IDS)).all()
    assert (stats.picks > 0).sum() > stats.picks.shape[0] * 3


def test_counts_do_not_depend_on_where_the_experts_are(model: Path, counted: Path, worker: Worker) -> None:
    found = route_stats(replace(on_the_cpu(model), expert_device=worker.name), [IDS])
    np.testing.assert_array_equal(found.picks, RouteStats.read(counted).picks)


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_copies_leave_every_logit_as_it_is(
    model: Path, counted: Path, worker: Worker, tmp_path: Path, part: float
) -> None:
    apart = replace(on_the_cpu(model), expert_device=worker.name)
    stats = RouteStats.read(counted)
    least = np.quantile(stats.picks, 1 - part, axis=1, keepdims=True) if part else np.inf
    kept = RouteStats(np.where(stats.picks >= least, stats.picks + 1, 0), stats.n_used, stats.n_tokens)
    kept.write(tmp_path / "kept.csv")
    hot = replace(apart, expert_placement=tmp_path / "kept.csv")
    expected = decoded(on_the_cpu(model))
    np.testing.assert_array_equal(decoded(hot), expected)
    np.testing.assert_array_equal(decoded(hot, near=True), expected)


def test_experts_of_few_rows_are_weighed_where_it_costs_least_and_every_logit_is_the_same(
    model: Path, worker: Worker
) -> None:
    """Over a network one row comes back, within a machine one of each expert."""
    apart = replace(on_the_cpu(model), expert_device=worker.name)
    np.testing.assert_array_equal(decoded(apart, near=True), decoded(on_the_cpu(model)))
    found = []
    with open_core(apart) as core:
        for near in (False, True):
            core._forwards._backend.near_links = near
            builder = core._forwards.builder(GraphKey(n_tokens=1, n_kv=256, slot=0, output="last"))
            try:
                cut = cut_of(builder)
                assert cut is not None
                ops = [c_string(lib.ggml_op_name(n.op)) for p in cut.parts if p.backend == 1 for n in p.nodes]
                found.append(Counter(ops))
            finally:
                builder.close()
    far, here = found
    assert here["MUL_MAT_ID"] == far["MUL_MAT_ID"] > 0
    assert far["ADD"] > here["ADD"] == 0


def test_copies_are_planned_within_their_budget_and_their_coverage_is_told(
    model: Path, counted: Path, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(
        on_the_cpu(model),
        expert_device=worker.name,
        expert_placement=counted,
        expert_budget_mib=1,
        spec="off",
    )
    with caplog.at_level(logging.INFO, "pyggml_dflash"):
        report = fit_report(options)
    near = report.devices[0]
    assert 0 < near.terms["hot experts"] <= MIB + 64 * 1024  # the tables come on top
    assert "experts are copied to CPU" in caplog.text
    assert "of the picks counted" in caplog.text
    without = fit_report(replace(options, expert_budget_mib=0)).devices[0]
    assert without.terms.get("hot experts", 0) == 0


def test_copies_need_the_experts_on_another_device(model: Path, counted: Path) -> None:
    with pytest.raises(UsageError, match="no other device has the experts"):
        fit_report(replace(on_the_cpu(model), expert_placement=counted))


def test_a_model_without_experts_has_nothing_to_count(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no routed experts to count"):
        route_stats(on_the_cpu(write_tiny(tmp_path, Tiny(architecture="qwen3"))), [IDS])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1, 10**9]], "token 1 is 1000000000; token ids are whole numbers from 0 to 263"),
        ([[-1]], "token 0 is -1"),
        ([[1.5]], "token 0 is 1.5"),
        ([5], "tokens is 5; they must be a sequence of token ids"),
        ("text", "texts is 'text'; it must be a sequence of texts"),
        (5, "texts is 5"),
    ],
)
def test_what_is_no_text_is_not_counted(model: Path, texts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        route_stats(on_the_cpu(model), texts)


def test_the_command_writes_what_placement_reads(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "picks.csv"
    shown = told("route-stats", str(model), "-p", "some text to read", "-o", str(out), "--device", "CPU")
    assert f"experts: {out}" in shown
    assert RouteStats.read(out).picks.sum() > 0
