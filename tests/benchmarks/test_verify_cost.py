"""The verify cost benchmark: every part is timed, what follows is arithmetic, profiling breaks nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from inside import backend_of, forwards_of, last_graph, on_core
from model_shapes import DRAFTS, PRESETS, tiny
from op_times import profile
from random_draft import write_draft
from random_model import write_model
from rates import Spread
from verify_cost import main
from verify_measure import WidthCost, accept_rate

from pyggml_dflash.engine.core import EngineCore
from tests.engine.tiny import opened, prompt


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its draft, which reads blocks of 8."""
    folder = tmp_path_factory.mktemp("pair")
    write_model(folder / "target.gguf", tiny(PRESETS["qwen35-27b"]), "Q8_0")
    write_draft(folder / "draft.gguf", DRAFTS["dflash2-27b"], "Q8_0", folder / "target.gguf")
    return folder / "target.gguf", folder / "draft.gguf"


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the JSON file has after a run on one thread of the CPU."""
    out = folder / "out.json"
    fixed = ["--device", "CPU", "--threads", "1", "--repeat", "1", "--json", str(out)]
    result = CliRunner().invoke(main, [*arguments, *fixed])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def exactly(value: float) -> Spread:
    return Spread(median=value, low=value, high=value)


def test_every_part_of_a_step_is_timed_for_both_ways_to_take_rows_back(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = pair
    found = run(tmp_path, str(target), "--draft", str(draft), "--context", "300", "--widths", "1,4,9")
    assert [(cost["update"], cost["width"]) for cost in found["costs"]] == [
        (update, width) for update in ("snapshots", "replay") for width in (1, 4, 9)
    ]
    for cost in found["costs"]:
        parts = ("plain", "plain_graph", "verify", "graph", "choose", "keep_one", "keep_all", "ratio")
        assert all(cost[part]["median"] > 0 for part in parts)
        assert (cost["draft"] is None) == (cost["width"] != 4)  # one row needs no draft, nine are no block
        assert (cost["step_ms"] is None) == (cost["width"] != 4)
    assert found["draft"] == draft.name


def test_without_a_draft_verify_forwards_are_timed_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = run(tmp_path, str(pair[0]), "--widths", "2", "--update", "replay", "--context", "5")
    assert [(c["width"], c["draft"], c["even_length"]) for c in found["costs"]] == [(2, None, None)]


def test_a_profile_has_every_operation_of_a_graph_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = run(tmp_path, str(pair[0]), "--widths", "2", "--update", "replay", "--profile", "3")
    assert list(found["profiles"]) == ["context 1024, plain", "context 1024, verify 3"]
    assert found["copy_gb_s"] > 0
    for graph in found["profiles"].values():
        assert sum(kind["n"] for kind in graph["kinds"]) == graph["n_nodes"]
        assert {"MUL_MAT Q8_0", "GATED_DELTA_NET", "RMS_NORM"} <= {kind["kind"] for kind in graph["kinds"]}


def test_a_graph_computes_the_same_after_it_was_taken_apart(pair: tuple[Path, Path]) -> None:
    def take_apart(core: EngineCore) -> None:
        forwards = forwards_of(core)
        forwards.decode(core.slots[0], 65)
        profile(backend_of(core), last_graph(forwards), 1)

    with opened(pair[0], max_ctx=256) as engine:
        before = engine.generate(prompt(9), max_tokens=12, ignore_eos=True).tokens
        on_core(engine, take_apart)
        assert engine.generate(prompt(9), max_tokens=12, ignore_eos=True).tokens == before


def test_experts_are_not_taken_apart_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tiny(PRESETS["qwen35moe-35b-a3b"]), "Q8_0")
    result = CliRunner().invoke(main, [str(path), "--profile", "2", "--device", "CPU", "--threads", "1"])
    assert result.exit_code == 2
    assert "experts" in result.output


@pytest.mark.parametrize("text", ["0-4", "17", "4-2", "x", ""])
def test_a_width_that_no_engine_allows_is_refused(pair: tuple[Path, Path], text: str) -> None:
    result = CliRunner().invoke(main, [str(pair[0]), "--widths", text])
    assert result.exit_code == 2
    assert "no list of widths" in result.output


def test_results_are_not_written_over_a_model(pair: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(main, [str(pair[0]), "--json", str(pair[1])])
    assert result.exit_code == 2
    assert "is a model" in result.output


@pytest.mark.parametrize(("width", "rate"), [(2, 0.5), (8, 0.0), (8, 0.3), (8, 0.9), (16, 1.0)])
def test_the_break_even_chance_gives_the_length_it_was_asked_for(width: int, rate: float) -> None:
    found = accept_rate(sum(rate**i for i in range(width)), width)
    assert found is not None
    assert abs(found - rate) < 1e-4


def test_no_chance_commits_more_tokens_than_rows() -> None:
    assert accept_rate(8.1, 8) is None


def test_a_step_pays_from_the_tokens_that_plain_steps_would_make_in_its_time() -> None:
    cost = WidthCost(
        context=0,
        update="replay",
        width=4,
        plain=exactly(9.0),
        plain_graph=exactly(8.0),
        verify=exactly(15.0),
        ratio=exactly(15 / 9),
        graph=exactly(14.0),
        choose=exactly(4.0),
        keep_one=exactly(0.5),
        keep_all=exactly(1.0),
        draft=exactly(5.0),
        inject=exactly(5.0),
    )
    assert cost.step_ms == 30
    assert cost.even_length == 3
    assert cost.even_rate == accept_rate(3, 4)
